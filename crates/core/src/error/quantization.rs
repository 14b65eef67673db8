//! What can be wrong with quantised weights in files.

#[derive(Debug, thiserror::Error)]
pub(crate) enum QuantizationErrorKind {
    #[error(
        "the quant_state of `{weight}` cannot be understood: {reason}; save the model again with bitsandbytes or with this library"
    )]
    State { weight: String, reason: String },
    #[error(
        "the quant_state of `{weight}` says {said}, but {found}; the file was put together from parts of others, or damaged. Save \
         it again"
    )]
    Lies { weight: String, said: String, found: String },
    #[error(
        "the quantised weight `{weight}` is not whole: {missing} is not there; a weight of 4 bits needs .absmax, .quant_map and \
         .quant_state beside it, and with nested scales .nested_absmax and .nested_quant_map, one of 8 bits its SCB"
    )]
    Missing { weight: String, missing: String },
    #[error("`{weight}` is there both as nf4 and as fp4; remove one of its quant_states")]
    TwoKinds { weight: String },
    #[error(
        "{field} has {found:?}, but no layer of the model is there; there are {known}. Correct the path, or leave it out"
    )]
    NoSuchModule { field: &'static str, found: String, known: String },
    #[error(
        "no layer of the model can be quantised: it has {num_linear} linear layers, and all of them are skipped; see \
         llm_int8_skip_modules"
    )]
    Nothing { num_linear: usize },
}
