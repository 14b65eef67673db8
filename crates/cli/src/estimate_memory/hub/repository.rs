//! The files of one commit of a model on the Hub.

use accelerate_core::weight_files::Header;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Deserialize;

use super::client::Client;
use super::{HubError, HubId, HubSettings};
use crate::estimate_memory::error::EstimateError;
use crate::estimate_memory::source::ModelFiles;

/// Longest list of files that is read: some times as long as those of the largest repositories.
const MAX_INFO_BYTES: u64 = 20_000_000;
/// How many files are asked for at the same time.
const NUM_READERS: usize = 8;
/// Bytes that say how long a header is.
const LENGTH_BYTES: u64 = 8;
/// What stands in an address as it is (RFC 3986, §2.3).
const ENCODED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// A model on the Hub, at the commit that its main branch has now.
pub(in crate::estimate_memory) struct Repository {
    client: Client,
    /// Where its files are.
    address: String,
    /// Of the files that are in no folder.
    names: Vec<String>,
}

/// What the Hub says of a model.
#[derive(Deserialize)]
struct Info {
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
}

impl Repository {
    /// Asks which files there are. All that is read later is of the same commit.
    pub(in crate::estimate_memory) fn open(id: HubId, settings: &HubSettings) -> Result<Self, HubError> {
        let client = Client::new(settings, &id)?;
        let endpoint = &settings.endpoint;
        let address = format!("{endpoint}/api/models/{id}/revision/main");
        let text = client.text(&address, MAX_INFO_BYTES)?;
        let answer = |reason| HubError::Answer { address: address.clone(), reason };
        let Info { sha, siblings } = serde_json::from_str(&text).map_err(|error| answer(error.to_string()))?;
        if sha.is_empty() || sha.len() > 100 || !sha.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
            return Err(answer("its sha is not that of a commit".to_owned()));
        }
        let names = siblings.into_iter().map(|sibling| sibling.rfilename).filter(|name| !name.contains('/')).collect();
        Ok(Self { client, address: format!("{endpoint}/{id}/resolve/{sha}"), names })
    }
}

impl ModelFiles for Repository {
    fn place(&self, name: &str) -> String {
        format!("{}/{}", self.address, utf8_percent_encode(name, ENCODED))
    }

    fn names(&self) -> Result<Vec<String>, EstimateError> {
        Ok(self.names.clone())
    }

    fn has(&self, name: &str) -> bool {
        self.names.iter().any(|known| known == name)
    }

    /// Only the header travels, not the weights.
    fn header(&self, name: &str) -> Result<Header, EstimateError> {
        let place = self.place(name);
        let first = self.client.part(&place, 0, LENGTH_BYTES)?;
        let mut bytes = first.bytes;
        let length = bytes.first_chunk().map_or(0, |length| u64::from_le_bytes(*length));
        let is_there = length <= Header::MAX_BYTES && length <= first.file_bytes.saturating_sub(LENGTH_BYTES);
        // What cannot be is left to the reader of headers, which says so.
        if is_there && length > 0 {
            let rest = self.client.part(&place, LENGTH_BYTES, length)?;
            if rest.file_bytes != first.file_bytes {
                let reason = format!("it had {} bytes, and then {}", first.file_bytes, rest.file_bytes);
                return Err(HubError::Answer { address: place, reason }.into());
            }
            bytes.extend(rest.bytes);
        }
        Header::read(&mut &bytes[..], first.file_bytes).map_err(|source| EstimateError::header(place, &source))
    }

    fn text(&self, name: &str, most_bytes: u64) -> Result<String, EstimateError> {
        Ok(self.client.text(&self.place(name), most_bytes)?)
    }

    fn num_readers(&self) -> usize {
        NUM_READERS
    }
}
