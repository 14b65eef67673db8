//! Requests and answers as bytes: a length of four bytes, little-endian, and as many bytes.

use crate::error::{Error, Result};
use std::io::{self, Read, Write};
use std::time::Duration;

/// The longest key.
const MAX_KEY_BYTES: usize = 1 << 12;
/// The longest value.
const MAX_VALUE_BYTES: usize = 1 << 24;
/// The longest message: a value and its key, or many keys.
pub(crate) const MAX_MESSAGE_BYTES: usize = MAX_VALUE_BYTES + (1 << 16);

pub(crate) fn check_sizes(key: &[u8], value: &[u8]) -> Result<()> {
    for (what, found, limit) in [("a key", key.len(), MAX_KEY_BYTES), ("a value", value.len(), MAX_VALUE_BYTES)] {
        if found > limit {
            return Err(Error::TooLarge { what, found, limit });
        }
    }
    Ok(())
}

/// What a client asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    Set { key: Vec<u8>, value: Vec<u8> },
    Get { key: Vec<u8>, timeout: Duration },
    CompareSet { key: Vec<u8>, expected: Vec<u8>, desired: Vec<u8> },
    Append { key: Vec<u8>, value: Vec<u8> },
    Add { key: Vec<u8>, amount: i64 },
    DeleteKey { key: Vec<u8> },
    NumKeys,
    Check { keys: Vec<Vec<u8>> },
    Wait { keys: Vec<Vec<u8>>, timeout: Duration },
}

/// What the server answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Done,
    Bytes(Vec<u8>),
    Number(i64),
    /// Keys that are not there after the time that was given for them.
    NotSet(String),
    /// Why it was refused, for people.
    Refused(String),
}

#[derive(Default)]
struct Writer(Vec<u8>);

impl Writer {
    fn number(mut self, number: u64) -> Self {
        self.0.extend(number.to_le_bytes());
        self
    }

    fn bytes(self, bytes: &[u8]) -> Self {
        let mut writer = self.number(bytes.len() as u64);
        writer.0.extend(bytes);
        writer
    }

    fn all(self, many: &[Vec<u8>]) -> Self {
        let writer = self.number(many.len() as u64);
        many.iter().fold(writer, |writer, bytes| writer.bytes(bytes))
    }

    fn timeout(self, timeout: Duration) -> Self {
        self.number(u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX))
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn number(&mut self) -> Option<u64> {
        let (number, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*number))
    }

    fn bytes(&mut self) -> Option<Vec<u8>> {
        let length = usize::try_from(self.number()?).ok()?;
        let (bytes, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(bytes.to_vec())
    }

    fn all(&mut self) -> Option<Vec<Vec<u8>>> {
        let count = usize::try_from(self.number()?).ok()?;
        // Each takes eight bytes at least, so a number that lies allocates nothing.
        (0..count.min(self.0.len() / 8 + 1))
            .map(|_| self.bytes())
            .collect::<Option<Vec<_>>>()
            .filter(|all| all.len() == count)
    }

    fn timeout(&mut self) -> Option<Duration> {
        self.number().map(Duration::from_millis)
    }

    fn end<T>(self, message: T) -> Option<T> {
        self.0.is_empty().then_some(message)
    }
}

impl Request {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let writer = Writer::default();
        match self {
            Self::Set { key, value } => writer.number(0).bytes(key).bytes(value),
            Self::Get { key, timeout } => writer.number(1).bytes(key).timeout(*timeout),
            Self::CompareSet { key, expected, desired } => writer.number(2).bytes(key).bytes(expected).bytes(desired),
            Self::Append { key, value } => writer.number(3).bytes(key).bytes(value),
            Self::Add { key, amount } => writer.number(4).bytes(key).number(*amount as u64),
            Self::DeleteKey { key } => writer.number(5).bytes(key),
            Self::NumKeys => writer.number(6),
            Self::Check { keys } => writer.number(7).all(keys),
            Self::Wait { keys, timeout } => writer.number(8).all(keys).timeout(*timeout),
        }
        .0
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader(bytes);
        let request = match reader.number()? {
            0 => Self::Set { key: reader.bytes()?, value: reader.bytes()? },
            1 => Self::Get { key: reader.bytes()?, timeout: reader.timeout()? },
            2 => Self::CompareSet { key: reader.bytes()?, expected: reader.bytes()?, desired: reader.bytes()? },
            3 => Self::Append { key: reader.bytes()?, value: reader.bytes()? },
            4 => Self::Add { key: reader.bytes()?, amount: reader.number()? as i64 },
            5 => Self::DeleteKey { key: reader.bytes()? },
            6 => Self::NumKeys,
            7 => Self::Check { keys: reader.all()? },
            8 => Self::Wait { keys: reader.all()?, timeout: reader.timeout()? },
            _ => return None,
        };
        reader.end(request)
    }
}

impl Answer {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let writer = Writer::default();
        match self {
            Self::Done => writer.number(0),
            Self::Bytes(bytes) => writer.number(1).bytes(bytes),
            Self::Number(number) => writer.number(2).number(*number as u64),
            Self::NotSet(keys) => writer.number(3).bytes(keys.as_bytes()),
            Self::Refused(reason) => writer.number(4).bytes(reason.as_bytes()),
        }
        .0
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader(bytes);
        let answer = match reader.number()? {
            0 => Self::Done,
            1 => Self::Bytes(reader.bytes()?),
            2 => Self::Number(reader.number()? as i64),
            3 => Self::NotSet(String::from_utf8(reader.bytes()?).ok()?),
            4 => Self::Refused(String::from_utf8(reader.bytes()?).ok()?),
            _ => return None,
        };
        reader.end(answer)
    }
}

pub(crate) fn send(mut stream: impl Write, message: &[u8]) -> io::Result<()> {
    let mut framed = Vec::with_capacity(4 + message.len());
    framed.extend((message.len() as u32).to_le_bytes());
    framed.extend(message);
    stream.write_all(&framed)
}

/// The next message. Memory is taken as bytes arrive, and not as they are announced.
pub(crate) fn receive(mut stream: impl Read) -> io::Result<Vec<u8>> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > MAX_MESSAGE_BYTES {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("a message of {length} bytes")));
    }
    let mut message = Vec::new();
    stream.take(length as u64).read_to_end(&mut message)?;
    if message.len() == length { Ok(message) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key() -> impl Strategy<Value = Vec<u8>> {
        prop::collection::vec(any::<u8>(), 0..20)
    }

    fn timeout() -> impl Strategy<Value = Duration> {
        any::<u32>().prop_map(|millis| Duration::from_millis(millis.into()))
    }

    fn request() -> impl Strategy<Value = Request> {
        let keys = || prop::collection::vec(key(), 0..5);
        prop_oneof![
            (key(), key()).prop_map(|(key, value)| Request::Set { key, value }),
            (key(), timeout()).prop_map(|(key, timeout)| Request::Get { key, timeout }),
            (key(), key(), key()).prop_map(|(key, expected, desired)| Request::CompareSet { key, expected, desired }),
            (key(), key()).prop_map(|(key, value)| Request::Append { key, value }),
            (key(), any::<i64>()).prop_map(|(key, amount)| Request::Add { key, amount }),
            key().prop_map(|key| Request::DeleteKey { key }),
            Just(Request::NumKeys),
            keys().prop_map(|keys| Request::Check { keys }),
            (keys(), timeout()).prop_map(|(keys, timeout)| Request::Wait { keys, timeout }),
        ]
    }

    proptest! {
        #[test]
        fn requests_arrive_as_they_were_sent(request in request()) {
            prop_assert_eq!(Request::decode(&request.encode()), Some(request.clone()));
            let mut bytes = Vec::new();
            send(&mut bytes, &request.encode()).unwrap();
            prop_assert_eq!(Request::decode(&receive(&bytes[..]).unwrap()), Some(request));
            prop_assert!(receive(&bytes[..bytes.len() - 1]).is_err());
        }

        #[test]
        fn nothing_that_is_sent_is_too_strange(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = Request::decode(&bytes);
            let _ = Answer::decode(&bytes);
            let _ = receive(&bytes[..]);
        }
    }

    #[test]
    fn answers_arrive_as_they_were_sent() {
        let texts = ["a, b".to_owned(), String::new()];
        for answer in [
            Answer::Done,
            Answer::Bytes(vec![0, 255]),
            Answer::Number(-3),
            Answer::NotSet(texts[0].clone()),
            Answer::Refused(texts[1].clone()),
        ] {
            assert_eq!(Answer::decode(&answer.encode()), Some(answer.clone()));
            assert_eq!(Answer::decode(&[&answer.encode()[..], &[0]].concat()), None);
        }
    }

    #[test]
    fn a_message_that_announces_too_much_is_refused_before_anything_is_allocated() {
        let announced = u32::MAX.to_le_bytes();
        assert_eq!(receive(&announced[..]).unwrap_err().kind(), io::ErrorKind::InvalidData);
        let many = Writer::default().number(7).number(u64::MAX).0;
        assert_eq!(Request::decode(&many), None);
    }
}
