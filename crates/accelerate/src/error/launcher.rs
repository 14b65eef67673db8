//! What can go wrong when a program launches its own functions.

#[derive(Debug, thiserror::Error)]
pub(crate) enum LauncherError {
    #[error(
        "num_processes is not given, and ACCELERATE_NUM_PROCESSES does not say it; say in how many processes the function is to run"
    )]
    NoNumProcesses,

    #[error("{problem}")]
    Options { problem: String },

    #[error(
        "{name} is not among the functions of workers! ({known}), so no process would find it; name it there, at the beginning of \
         main or in this cell"
    )]
    UnknownFunction { name: &'static str, known: String },

    #[error("workers! has {name} more than once, and nobody can tell which is meant; name each function once")]
    TwoFunctions { name: &'static str },

    #[error(
        "{name} was to be launched inside a process that a launcher has started itself; only the program or notebook at the \
         top launches"
    )]
    InsideWorker { name: &'static str },

    #[error(
        "this process holds {num_accelerators} accelerator{}, which only the launched function should make: drop {}, with all \
         that was prepared, or restart the notebook and make the Accelerator inside of the function",
        if *num_accelerators == 1 { "" } else { "s" },
        if *num_accelerators == 1 { "it" } else { "them" }
    )]
    HasAccelerator { num_accelerators: usize },

    #[error(
        "this process has initialised CUDA, and would keep memory of the devices that the launched function needs; restart the \
         program or notebook, and use devices only inside of the function"
    )]
    HasCuda,

    #[error(
        "the argument of {name} cannot be sent to other processes: {source}; serde has to be able to write all of it"
    )]
    ArgumentsUnsent { name: &'static str, source: rmp_serde::encode::Error },

    #[error(
        "the argument of {name} cannot be read again from what serde has written of it: {source}; its Deserialize has to \
         understand its Serialize"
    )]
    ArgumentsUnread { name: &'static str, source: rmp_serde::decode::Error },

    #[error(
        "what rank {rank} returned from {name} cannot be read: {source}; its Deserialize has to understand its Serialize"
    )]
    ResultUnread { name: &'static str, rank: usize, source: rmp_serde::decode::Error },

    #[error(
        "rank {rank} ended with code 0 before {name} had returned: the function ends the process, or the main of a new process \
         does not come to workers!, which belongs at its beginning"
    )]
    NoResult { name: &'static str, rank: usize },

    #[error(
        "the function is in the library {path}, which no new process of this program would load; launch from the program's own \
         code, or from a cell of evcxr"
    )]
    InLibrary { path: String },

    #[error("this process cannot {action}: {source}")]
    System { action: &'static str, source: std::io::Error },

    #[error("{name} failed: {}", error.story())]
    Failed { name: &'static str, error: accelerate_launch::Error },
}

impl LauncherError {
    pub(crate) fn failed_rank(&self) -> Option<usize> {
        match self {
            Self::Failed { error, .. } => error.rank(),
            Self::NoResult { rank, .. } | Self::ResultUnread { rank, .. } => Some(*rank),
            _ => None,
        }
    }
}
