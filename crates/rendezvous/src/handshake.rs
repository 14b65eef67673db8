//! How both sides prove that they belong to the same run, without sending the secret.
//!
//! The server sends a greeting and a nonce. The client answers with a nonce of its own and a code over both, the server with
//! its code. Codes are HMAC-SHA256 under the secret, of different texts for the two sides, so none can be sent back.

use crate::error::{Error, Result};
use hmac::{Hmac, Mac};
use sha2::Sha256;
use std::fmt;
use std::io::{self, Read, Write};

const GREETING: &[u8; 8] = b"accelrv1";
const NONCE_BYTES: usize = 32;
const CODE_BYTES: usize = 32;
const WELCOME: u8 = 1;

/// What the ranks of one run know and nobody else does. It is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Vec<u8>);

impl Secret {
    /// Any bytes; none where ranks were started by something that has no secret to hand on.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Self {
        Self(bytes.into())
    }

    /// 32 random bytes as hexadecimal digits, for a variable of the environment.
    ///
    /// # Errors
    /// The system gives no random numbers.
    pub fn random() -> Result<String> {
        Ok(nonce()?.iter().map(|byte| format!("{byte:02x}")).collect())
    }

    fn code(&self, side: &[u8], server: &[u8], client: &[u8]) -> Option<Hmac<Sha256>> {
        let mut code = Hmac::<Sha256>::new_from_slice(&self.0).ok()?;
        [GREETING.as_slice(), side, server, client].iter().for_each(|part| code.update(part));
        Some(code)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_empty() { "Secret(none)" } else { "Secret(..)" })
    }
}

fn nonce() -> Result<[u8; NONCE_BYTES]> {
    let mut nonce = [0; NONCE_BYTES];
    getrandom::fill(&mut nonce).map_err(|error| Error::NoRandomNumbers { reason: error.to_string() })?;
    Ok(nonce)
}

/// Is whoever connected a member of the run? A stranger learns nothing but the greeting.
pub(crate) fn admit(mut stream: impl Read + Write, secret: &Secret) -> io::Result<bool> {
    let own = nonce().map_err(io::Error::other)?;
    stream.write_all(&[GREETING.as_slice(), &own].concat())?;
    let mut answer = [0; NONCE_BYTES + CODE_BYTES];
    stream.read_exact(&mut answer)?;
    let (theirs, code) = answer.split_at(NONCE_BYTES);
    let is_member = secret.code(b"client", &own, theirs).is_some_and(|own| own.verify_slice(code).is_ok());
    if !is_member {
        stream.write_all(&[0])?;
        return Ok(false);
    }
    let Some(code) = secret.code(b"server", &own, theirs) else { return Ok(false) };
    stream.write_all(&[&[WELCOME], &code.finalize().into_bytes()[..]].concat())?;
    Ok(true)
}

/// What a client finds at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    TheRun,
    OtherSecret,
    OtherProgram,
}

/// Proves that this process belongs to the run, and finds out whether the server does.
pub(crate) fn introduce(mut stream: impl Read + Write, secret: &Secret) -> io::Result<Found> {
    let mut greeting = [0; 8 + NONCE_BYTES];
    stream.read_exact(&mut greeting)?;
    let (name, theirs) = greeting.split_at(8);
    if name != GREETING {
        return Ok(Found::OtherProgram);
    }
    let own = nonce().map_err(io::Error::other)?;
    let Some(code) = secret.code(b"client", theirs, &own) else { return Ok(Found::OtherSecret) };
    stream.write_all(&[&own[..], &code.finalize().into_bytes()[..]].concat())?;
    let mut welcome = [0];
    stream.read_exact(&mut welcome)?;
    if welcome != [WELCOME] {
        return Ok(Found::OtherSecret);
    }
    let mut code = [0; CODE_BYTES];
    stream.read_exact(&mut code)?;
    let is_server = secret.code(b"server", theirs, &own).is_some_and(|own| own.verify_slice(&code).is_ok());
    Ok(if is_server { Found::TheRun } else { Found::OtherSecret })
}
