//! The one error of this crate: which operation failed, how, and libtorch's own words.

use std::fmt;

/// The result of every fallible call of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// An operation of libtorch that failed.
///
/// It carries the operation's name (`"all_reduce"`, `"TCPStore"`), a coarse kind that callers can ask
/// for with the `is_*` methods, and the text libtorch gave. It is one word wide.
///
/// ```
/// let (x, y) = (tch::Tensor::from_slice(&[1f32, 2.0]), tch::Tensor::from_slice(&[1f32, 2.0, 3.0]));
/// let error = torch_ext::foreach::add_(&[&x], &[&y], 1.0).unwrap_err();
/// assert_eq!(error.operation(), "foreach::add_");
/// assert!(error.message().contains("must match the size"));
/// ```
pub struct Error(Box<Inner>);

struct Inner {
    kind: ErrorKind,
    operation: &'static str,
    message: String,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

/// Numbers are shared with `ErrorKind` in shim/common.h.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum ErrorKind {
    Torch,
    Timeout,
    Connection,
    Invalid,
    Callback,
    NotCompiled,
    /// Only made on this side.
    Busy,
}

impl ErrorKind {
    pub(crate) fn from_border(code: i32) -> Self {
        match code {
            1 => Self::Timeout,
            2 => Self::Connection,
            3 => Self::Invalid,
            4 => Self::Callback,
            5 => Self::NotCompiled,
            _ => Self::Torch,
        }
    }
}

impl Error {
    #[cold]
    pub(crate) fn new(kind: ErrorKind, operation: &'static str, message: impl Into<String>) -> Self {
        Self(Box::new(Inner { kind, operation, message: message.into(), source: None }))
    }

    #[cold]
    pub(crate) fn invalid(operation: &'static str, message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Invalid, operation, message)
    }

    /// A deadline that passed while Rust code waited for other ranks without libtorch.
    ///
    /// ```
    /// assert!(torch_ext::Error::timeout("all_gather", "rank 1 is late").is_timeout());
    /// ```
    #[cold]
    pub fn timeout(operation: &'static str, message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Timeout, operation, message)
    }

    /// A rank that Rust code has lost without libtorch.
    ///
    /// ```
    /// assert!(torch_ext::Error::connection("all_gather", "rank 1 is gone").is_connection());
    /// ```
    #[cold]
    pub fn connection(operation: &'static str, message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Connection, operation, message)
    }

    /// Attaches the error a Rust callback returned.
    #[cold]
    pub(crate) fn callback(operation: &'static str, source: Box<dyn std::error::Error + Send + Sync>) -> Self {
        let message = source.to_string();
        Self(Box::new(Inner { kind: ErrorKind::Callback, operation, message, source: Some(source) }))
    }

    /// The operation that failed, for example `"all_reduce"`.
    pub fn operation(&self) -> &'static str {
        self.0.operation
    }

    /// What libtorch said.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    pub(crate) fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// A deadline passed before the operation finished.
    pub fn is_timeout(&self) -> bool {
        self.0.kind == ErrorKind::Timeout
    }

    /// A peer or the rendezvous store could not be reached, or went away.
    pub fn is_connection(&self) -> bool {
        self.0.kind == ErrorKind::Connection
    }

    /// The arguments were refused.
    pub fn is_invalid_argument(&self) -> bool {
        self.0.kind == ErrorKind::Invalid
    }

    /// A closure given to libtorch (a hook, a custom function) returned an error; see [`std::error::Error::source`].
    pub fn is_callback(&self) -> bool {
        self.0.kind == ErrorKind::Callback
    }

    /// What there is one of in a process is in use, for example the profiler.
    pub fn is_busy(&self) -> bool {
        self.0.kind == ErrorKind::Busy
    }

    /// The operation needs a cargo feature that this build lacks.
    pub fn is_feature_disabled(&self) -> bool {
        self.0.kind == ErrorKind::NotCompiled
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} failed: {}", self.0.operation, self.0.message)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Error")
            .field("kind", &self.0.kind)
            .field("operation", &self.0.operation)
            .field("message", &self.0.message)
            .finish()
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source.as_deref().map(|source| source as _)
    }
}
