//! What Python says of an export that failed, in the words of the command.

use std::fmt::{self, Display};

use serde::Deserialize;

/// The most characters of a text of PyTorch that are told; its longest go on for pages.
const MOST_CHARACTERS: usize = 400;
/// What its hints at its own logs and functions begin with.
const HINTS: [&str; 4] = [
    "The error above occurred when calling",
    "For more information, run",
    "consider using data-dependent",
    " If you're using mark_dynamic",
];

/// What Python has written.
#[derive(Debug, Deserialize)]
pub(super) struct Reported {
    stage: String,
    text: String,
    /// `models.py:12`, or nothing.
    place: String,
}

impl Reported {
    /// Whether the model may have been given a whole number that is no index for it.
    pub(super) fn is_about_an_index(&self) -> bool {
        let texts = ["IndexError", "out of range", "out of bounds", "device-side assert"];
        self.stage == "examples" && texts.iter().any(|text| self.text.contains(text))
    }
}

/// An export that failed.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) reported: Reported,
    pub(super) function: String,
    /// The sizes of the examples, as in `batch=6, length=7`.
    pub(super) sizes: String,
}

impl std::error::Error for Failure {}

impl Display for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Reported { stage, place, .. } = &self.reported;
        let text = shortened(&self.reported.text);
        let text = if place.is_empty() { text } else { format!("{text}, at {place}") };
        let function = &self.function;
        match stage.as_str() {
            "torch" => write!(
                formatter,
                "Python has not what exporting needs, torch and safetensors: {text}; name another with --python"
            ),
            "import" => write!(
                formatter,
                "{function} cannot be imported from this folder: {text}; name a module that can, and a function in it"
            ),
            "call" => write!(
                formatter,
                "{function} gives no model: {text}; it is called without arguments, and returns a torch.nn.Module"
            ),
            "examples" => {
                write!(formatter, "the model does not work with examples of its inputs: {text}; {}", self.examples())
            }
            "export" | "compile" => {
                let verb = if stage == "export" { "exported" } else { "compiled" };
                write!(formatter, "the model cannot be {verb}: {text}; {}", self.cure())
            }
            "train" | "eval" => write!(
                formatter,
                "in the pass of \"{stage}\", what is exported does something else than the model, given the same inputs, parameters and seed: \
                 {text}; what forward keeps in Python, such as a count of passes, becomes a constant: keep it in a buffer that is changed \
                 in place; the backward pass of a torch.autograd.Function is left out, and so is the dropout of a torch.nn.GRU or LSTM: \
                 write what they compute in other operators"
            ),
            "compiled" => write!(
                formatter,
                "the compiled code computes something else than the model: {text}; this is a fault of PyTorch's compiler, and nothing is \
                 written: write the model in other operators"
            ),
            _ => formatter.write_str(&text),
        }
    }
}

impl Failure {
    fn examples(&self) -> String {
        let made = "examples are random numbers, and whole numbers 0 and 1 in turn";
        match self.sizes.split_once('=') {
            None => format!("{made}, of the sizes in --inputs, one for each input of forward"),
            Some((name, _)) => format!(
                "{made}, one for each input of forward, with {}; other sizes are named in --inputs, as in float32[{name}=32]",
                self.sizes
            ),
        }
    }

    /// What helps against what PyTorch says.
    fn cure(&self) -> String {
        let says = |part: &str| self.reported.text.contains(part);
        if says("Constraints violated") {
            format!(
                "examples have {}; a size with a name has to be free in the model: write the number that is used in its place in --inputs",
                self.sizes
            )
        } else if says("data-dependent") {
            "forward may not branch on values of tensors, by .item() or an `if`, nor take sizes from them: use torch.where".to_owned()
        } else if says("CxxCompiler") || says("C++ compiler") {
            "install a C++ compiler such as g++, or name one in the variable CXX".to_owned()
        } else {
            format!("change what forward does there; {}", self.examples())
        }
    }
}

/// In one line, up to where PyTorch's hints at its own logs and functions begin.
fn shortened(text: &str) -> String {
    let text = text.replace("For more information, run with TORCH_LOGS=\"+dynamic\".", "");
    let text = HINTS
        .iter()
        .filter_map(|hint| text.split_once(hint))
        .map(|(before, _)| before)
        .min_by_key(|text| text.len())
        .unwrap_or(&text);
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(MOST_CHARACTERS) {
        Some((end, _)) => format!("{} ...", line.get(..end).unwrap_or_default()),
        None => line,
    }
}

#[cfg(test)]
mod tests {
    use super::{Failure, Reported};

    fn told(stage: &str, text: &str) -> String {
        let reported = Reported { stage: stage.to_owned(), text: text.to_owned(), place: "models.py:12".to_owned() };
        Failure { reported, function: "models:build".to_owned(), sizes: "b=6, t=7".to_owned() }.to_string()
    }

    #[test]
    fn a_failure_is_one_line_with_a_cure() {
        let long = "x ".repeat(2000);
        for (stage, text, words) in [
            ("import", "SyntaxError: invalid syntax", "models:build cannot be imported from this folder: SyntaxError"),
            ("call", "ValueError: no", "ValueError: no, at models.py:12; it is called without arguments"),
            (
                "examples",
                "RuntimeError: Kernel size",
                "b=6, t=7; other sizes are named in --inputs, as in float32[b=32]",
            ),
            (
                "export",
                "E: Constraints violated (t)!\nFor more information, run with X",
                "violated (t)!, at models.py:12; examples",
            ),
            ("export", "UserError: Constraints violated (t)!\n  t = 7", "examples have b=6, t=7; a size with a name"),
            ("export", "GuardOnDataDependentSymNode: Could not guard on data-dependent expression", "torch.where"),
            ("export", "InvalidCxxCompiler: No working C++ compiler", "install a C++ compiler"),
            ("train", "the loss differs", "what forward keeps in Python"),
            ("compiled", "the loss differs", "nothing is written"),
            ("", &long, " ..."),
        ] {
            let told = told(stage, text);
            assert!(told.contains(words) && !told.contains('\n') && told.len() < 1000, "{told}");
        }
    }
}
