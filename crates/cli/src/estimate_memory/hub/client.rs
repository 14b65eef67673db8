//! Requests with a deadline and a bound. Redirects are followed here and not by the HTTP client, because a token goes to the
//! endpoint only: not to another scheme, host or port.

use std::io::Read;
use std::time::{Duration, Instant};

use ureq::http::header::{CONTENT_RANGE, CONTENT_TYPE, LOCATION};
use ureq::http::{HeaderMap, Response, Uri};
use ureq::tls::{RootCerts, TlsConfig};
use ureq::{Agent, Body};

use super::error::{HubError, cure};
use super::{HubId, HubSettings, Token};

const MAX_REDIRECTS: usize = 5;
const CONNECT_DEADLINE: Duration = Duration::from_secs(10);

/// Asks one endpoint, about one model.
pub(super) struct Client {
    agent: Agent,
    endpoint: Uri,
    /// The page of the model, for people.
    page: String,
    token: Option<Token>,
    deadline: Duration,
}

/// A part of a file, and the size of all of it.
pub(super) struct Part {
    pub(super) bytes: Vec<u8>,
    pub(super) file_bytes: u64,
}

impl Client {
    pub(super) fn new(settings: &HubSettings, id: &HubId) -> Result<Self, HubError> {
        let endpoint: Uri = settings.endpoint.parse().map_err(|_| HubError::Endpoint)?;
        let is_right = matches!(endpoint.scheme_str(), Some("http" | "https"))
            && endpoint.authority().is_some_and(|authority| !authority.as_str().contains('@'))
            && endpoint.query().is_none();
        if !is_right {
            return Err(HubError::Endpoint);
        }
        let agent = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_connect(Some(CONNECT_DEADLINE.min(settings.deadline)))
            // Certificates of this machine, among them those of a company's proxy.
            .tls_config(TlsConfig::builder().root_certs(RootCerts::PlatformVerifier).build())
            .user_agent(concat!("accelerate-rs/", env!("CARGO_PKG_VERSION")))
            .build()
            .new_agent();
        let page = format!("{}/{id}", settings.endpoint);
        Ok(Self { agent, endpoint, page, token: settings.token.clone(), deadline: settings.deadline })
    }

    /// All of a text, which may have `most_bytes`.
    pub(super) fn text(&self, address: &str, most_bytes: u64) -> Result<String, HubError> {
        let (response, uri, until) = self.get(address, None)?;
        let bytes = self.body(response, &uri, most_bytes, until)?;
        String::from_utf8(bytes).map_err(|_| HubError::Answer {
            address: shown_address(&uri),
            reason: "it is not text in UTF-8".to_owned(),
        })
    }

    /// `num_bytes` bytes of a file from `start` on, or fewer if it ends before.
    pub(super) fn part(&self, address: &str, start: u64, num_bytes: u64) -> Result<Part, HubError> {
        let last = start.saturating_add(num_bytes).saturating_sub(1);
        let (response, uri, until) = self.get(address, Some(format!("bytes={start}-{last}")))?;
        if response.status() != 206 {
            return Err(HubError::NoRanges { address: shown_address(&uri) });
        }
        let header = response.headers().get(CONTENT_RANGE).and_then(|value| value.to_str().ok()).unwrap_or_default();
        let said = header.to_owned();
        let wrong =
            |found: String| HubError::Range { address: shown_address(&uri), wanted: format!("{start}-{last}"), found };
        let (found, file_bytes) = content_range(&said).ok_or_else(|| wrong(format!("{said:?}")))?;
        if found != (start, last.min(file_bytes.saturating_sub(1))) {
            return Err(wrong(format!("{said:?}")));
        }
        let bytes = self.body(response, &uri, num_bytes, until)?;
        match found.1 - found.0 + 1 {
            wanted if wanted == bytes.len() as u64 => Ok(Part { bytes, file_bytes }),
            _ => Err(wrong(format!("{} bytes as {said:?}", bytes.len()))),
        }
    }

    /// Asks for an address and for those that it leads to, until one answers. All of that has one deadline.
    fn get(&self, address: &str, range: Option<String>) -> Result<(Response<Body>, Uri, Instant), HubError> {
        let until = Instant::now() + self.deadline;
        let mut uri: Uri = address.parse().map_err(|_| HubError::Endpoint)?;
        for _ in 0..=MAX_REDIRECTS {
            let mut request = self.agent.get(&uri).header("accept-encoding", "identity");
            if let Some(range) = &range {
                request = request.header("range", range);
            }
            if let Some(Token(token)) = self.token.as_ref().filter(|_| origin(&uri) == origin(&self.endpoint)) {
                request = request.header("authorization", format!("Bearer {token}"));
            }
            let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
            let request = request.config().timeout_global(Some(left)).build();
            let response = request.call().map_err(|source| self.failed(&uri, source))?;
            match response.status().as_u16() {
                200 | 206 => return self.file(response, uri).map(|(response, uri)| (response, uri, until)),
                301 | 302 | 303 | 307 | 308 => uri = next(&uri, response.headers())?,
                status => return Err(self.refused(&uri, status, response.headers())),
            }
        }
        Err(HubError::Redirect {
            address: address.to_owned(),
            location: shown_address(&uri),
            wanted: "it leads on and on",
        })
    }

    fn file(&self, response: Response<Body>, uri: Uri) -> Result<(Response<Body>, Uri), HubError> {
        let kind = response.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
        if kind.trim_start().to_ascii_lowercase().starts_with("text/html") {
            return Err(HubError::WebPage { address: shown_address(&uri) });
        }
        Ok((response, uri))
    }

    fn body(&self, response: Response<Body>, uri: &Uri, most_bytes: u64, until: Instant) -> Result<Vec<u8>, HubError> {
        let address = || shown_address(uri);
        let mut bytes = Vec::new();
        // One more, to see that there are more.
        let outcome = response.into_body().into_reader().take(most_bytes.saturating_add(1)).read_to_end(&mut bytes);
        if bytes.len() as u64 > most_bytes {
            return Err(HubError::Long { address: address(), most_bytes });
        }
        match outcome {
            Ok(_) => Ok(bytes),
            Err(_) if Instant::now() >= until => Err(self.late(uri)),
            Err(source) => Err(HubError::Broken { address: address(), found_bytes: bytes.len(), source }),
        }
    }

    fn failed(&self, uri: &Uri, source: ureq::Error) -> HubError {
        match source {
            // Connecting has a deadline of its own, and a machine that cannot be reached is nothing to wait for.
            ureq::Error::Timeout(which) if !matches!(which, ureq::Timeout::Connect | ureq::Timeout::Resolve) => {
                self.late(uri)
            }
            ureq::Error::Protocol(_) | ureq::Error::Http(_) | ureq::Error::LargeResponseHeader(..) => {
                HubError::Answer { address: shown_address(uri), reason: source.to_string() }
            }
            source => HubError::Connection { address: shown_address(uri), source },
        }
    }

    fn late(&self, uri: &Uri) -> HubError {
        HubError::Deadline { address: shown_address(uri), seconds: self.deadline.as_secs() }
    }

    fn refused(&self, uri: &Uri, status: u16, headers: &HeaderMap) -> HubError {
        let code = headers.get("x-error-code").and_then(|value| value.to_str().ok()).unwrap_or_default();
        let cure = cure(status, code, &self.page, self.token.is_some());
        HubError::Status { address: shown_address(uri), status, cure }
    }
}

/// Without what follows `?`: servers put signatures there, which are as good as passwords.
fn shown_address(uri: &Uri) -> String {
    let host = uri.authority().map_or("", |authority| authority.as_str().rsplit('@').next().unwrap_or_default());
    format!("{}://{host}{}", uri.scheme_str().unwrap_or_default(), uri.path())
}

/// Who answers: scheme, host and port.
fn origin(uri: &Uri) -> (Option<&str>, String, Option<u16>) {
    let usual = match uri.scheme_str() {
        Some("https") => Some(443),
        _ => Some(80),
    };
    (uri.scheme_str(), uri.host().unwrap_or_default().to_ascii_lowercase(), uri.port_u16().or(usual))
}

/// Where an answer leads to.
fn next(from: &Uri, headers: &HeaderMap) -> Result<Uri, HubError> {
    let location = headers.get(LOCATION).map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned());
    let location = location.unwrap_or_default();
    let shown = || location.split('?').next().unwrap_or_default().to_owned();
    let wrong = |wanted| HubError::Redirect { address: shown_address(from), location: shown(), wanted };
    let to = resolve(from, &location).ok_or_else(|| wrong("an address of http or https is wanted"))?;
    match (from.scheme_str(), to.scheme_str()) {
        (Some("https"), Some("http")) => Err(wrong("what is asked for safely is not fetched unsafely")),
        _ => Ok(to),
    }
}

/// An address, which may be a part of one that counts from `from` (RFC 3986, §5.2).
pub(super) fn resolve(from: &Uri, location: &str) -> Option<Uri> {
    let (scheme, authority) = (from.scheme_str()?, from.authority()?);
    let folder = from.path().rsplit_once('/').map_or("", |(folder, _)| folder);
    let location = location.split('#').next().unwrap_or_default();
    let absolute = match location {
        "" => return None,
        whole if whole.contains("://") => whole.to_owned(),
        path if path.starts_with("//") => format!("{scheme}:{path}"),
        path if path.starts_with('/') => format!("{scheme}://{authority}{path}"),
        relative => format!("{scheme}://{authority}{folder}/{relative}"),
    };
    let to: Uri = absolute.parse().ok()?;
    (matches!(to.scheme_str(), Some("http" | "https")) && to.host().is_some_and(|host| !host.is_empty())).then_some(to)
}

/// First byte, last byte and the size of the file out of `bytes 0-7/100`.
pub(super) fn content_range(text: &str) -> Option<((u64, u64), u64)> {
    let (range, file_bytes) = text.trim().strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let (first, last, file_bytes): (u64, u64, u64) =
        (first.parse().ok()?, last.parse().ok()?, file_bytes.parse().ok()?);
    (first <= last && last < file_bytes).then_some(((first, last), file_bytes))
}
