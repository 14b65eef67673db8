//! What can go wrong with a model on the Hub. Addresses are shown without what follows `?`, which may be a secret of its own.

use accelerate_core::weight_files::shown;

#[derive(Debug, thiserror::Error)]
pub(in crate::estimate_memory) enum HubError {
    #[error(
        "HF_ENDPOINT is not an address of the Hub; https://host, or https://host/path, without a user name is wanted: unset it \
         for https://huggingface.co"
    )]
    Endpoint,
    #[error("HF_HUB_DOWNLOAD_TIMEOUT is {:?}, and a whole number of seconds of at least 1 is wanted", shown(found))]
    DeadlineVariable { found: String },
    #[error(
        "the token of HF_TOKEN, or of the file `token` in HF_HOME, has signs that cannot be sent; log in anew with \
         `hf auth login`"
    )]
    Token,
    #[error(
        "{address} cannot be reached; see that there is a network, and that HF_ENDPOINT, HTTPS_PROXY and SSL_CERT_FILE, if set, are \
         right. Without a network, a model is read from its folder, or from the cache of the Hub"
    )]
    Connection { address: String, source: ureq::Error },
    #[error(
        "{address} has not answered in full within {seconds} s; try again, or allow more time with HF_HUB_DOWNLOAD_TIMEOUT"
    )]
    Deadline { address: String, seconds: u64 },
    #[error("the answer of {address} broke off after {found_bytes} bytes; try again")]
    Broken { address: String, found_bytes: usize, source: std::io::Error },
    #[error("{address} answered {status}: {cure}")]
    Status { address: String, status: u16, cure: String },
    #[error("{address} leads to {}, and {wanted}; see that HF_ENDPOINT is right", shown(location))]
    Redirect { address: String, location: String, wanted: &'static str },
    #[error(
        "{address} answered with a web page in place of a file; a network that asks for a login does so: open any page in a \
         browser, log in, and try again"
    )]
    WebPage { address: String },
    #[error(
        "{address} sends files as a whole only, and headers are read by requests for ranges; name another server in \
         HF_ENDPOINT, or fetch the model and name its folder"
    )]
    NoRanges { address: String },
    #[error(
        "{address} was asked for bytes {wanted}, and sent {found}; the server, or something between here and there, is wrong: \
         try again, or fetch the model and name its folder"
    )]
    Range { address: String, wanted: String, found: String },
    #[error("{address} has more than {most_bytes} bytes, which no such file has; name another model")]
    Long { address: String, most_bytes: u64 },
    #[error("the answer of {address} cannot be understood: {reason}; see that HF_ENDPOINT names a Hub")]
    Answer { address: String, reason: String },
}

/// What to do about an answer that is none. `code` is what the Hub says of the reason.
pub(super) fn cure(status: u16, code: &str, page: &str, has_token: bool) -> String {
    let login = match has_token {
        true => {
            "the token that was sent (HF_TOKEN, or the file `token` in HF_HOME) is not enough; use one of an account that \
                 may read it"
        }
        false => "no token was sent; set HF_TOKEN, or log in with `hf auth login`",
    };
    match (status, code) {
        (_, "GatedRepo") => format!("the model is gated; accept its conditions at {page}, and then: {login}"),
        (401 | 403 | 404, "RepoNotFound") | (401, _) => {
            format!("there is no such model, or it is private. Look at the name; if it is private: {login}")
        }
        (403, _) => format!("it may not be read; {login}"),
        (404, _) => "there is no such model or file; look at the name, which is that of the model's page (owner/name)"
            .to_owned(),
        (429, _) => format!("too many requests; wait a while, and then: {login}"),
        (500..=599, _) => "the server has a fault; try again in a while".to_owned(),
        _ => "this was not expected; see that HF_ENDPOINT names a Hub".to_owned(),
    }
}
