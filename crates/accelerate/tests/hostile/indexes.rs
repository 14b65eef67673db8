//! Indexes of weight files that were made to do harm, each with what its refusal has to say. Beside each of them lie
//! `a.safetensors` with the tensor `w`, and nothing else.

#![allow(dead_code, reason = "each test program uses its own part of it")]

/// The name of the index, which begins every message.
pub const INDEX: &str = "model.safetensors.index.json";

/// What is wrong, how to make it, and what the message has to say.
pub type LargeCase = (&'static str, fn() -> Vec<u8>, &'static str);

/// Small indexes: what is wrong, the text, and what the message has to say.
pub fn indexes() -> Vec<(String, Vec<u8>, &'static str)> {
    let mut cases: Vec<(String, Vec<u8>, &'static str)> = Vec::new();
    for (name, text, part) in syntax().into_iter().chain(values()).chain(paths()) {
        cases.push((name.to_owned(), text.into_bytes(), part));
    }
    let whole = r#"{"metadata":{"total_size":4},"weight_map":{"w":"a.safetensors"}}"#;
    for (at, _) in whole.match_indices(['{', '"', ':', ',']) {
        cases.push((format!("an index that ends with {}", &whole[..=at]), whole[..=at].into(), "EOF while parsing"));
    }
    cases.push(("bytes that are no UTF-8".into(), b"{\"weight_map\":{\"\xff\":\"a.safetensors\"}}".to_vec(), "UTF-8"));
    cases.push(("UTF-16".into(), whole.encode_utf16().flat_map(u16::to_le_bytes).collect(), "key must be a string"));
    cases
}

/// Indexes that take their time: made one by one.
pub const LARGE_INDEXES: [LargeCase; 6] = [
    ("one tensor more than is read", || many_tensors(300_001), "more than 300000 keys"),
    ("a million tensors", || many_tensors(1_000_000), "more than 300000 keys"),
    ("a million numbers as a note", many_numbers, "there is more in it than is read"),
    ("a thousand notes of a thousand numbers", many_lists, "there is more in it than is read"),
    ("60 MB of blanks", || vec![b' '; 60_000_000], "60000000 bytes"),
    ("a name of 40 MB", || format!(r#"{{"weight_map":{{"{}":0}}}}"#, "n".repeat(40_000_000)).into(), "40000000 bytes"),
];

fn many_tensors(number: usize) -> Vec<u8> {
    let entries: Vec<String> = (0..number).map(|index| format!(r#""t{index}":"a.safetensors""#)).collect();
    format!(r#"{{"weight_map":{{{}}}}}"#, entries.join(",")).into()
}

fn many_numbers() -> Vec<u8> {
    format!(r#"{{"metadata":{{"n":[{}0]}},"weight_map":{{}}}}"#, "0,".repeat(1_000_000)).into()
}

fn many_lists() -> Vec<u8> {
    let notes: Vec<String> = (0..1000).map(|index| format!(r#""n{index}":[{}0]"#, "0,".repeat(1000))).collect();
    format!(r#"{{"metadata":{{{}}},"weight_map":{{}}}}"#, notes.join(",")).into()
}

type Case = (&'static str, String, &'static str);

fn syntax() -> Vec<Case> {
    [
        ("nothing", "", "EOF while parsing"),
        ("brackets that do not fit", "{]", "key must be a string"),
        ("a list", "[]", "invalid type: sequence"),
        ("metadata and map as a list", r#"[{"total_size":4},{"w":"a.safetensors"}]"#, "invalid type: sequence"),
        ("null", "null", "invalid type: null"),
        ("a number", "3", "invalid type: integer"),
        ("a text", r#""model""#, "invalid type: string"),
        ("a byte order mark", "\u{feff}{}", "expected value"),
        ("something behind the object", r#"{"weight_map":{}}{}"#, "trailing characters"),
        ("a comma too many", r#"{"weight_map":{},}"#, "trailing comma"),
        ("a comment", "// none\n{}", "expected value"),
        ("NaN", r#"{"metadata":{"total_size":NaN},"weight_map":{}}"#, "expected value"),
        ("Infinity", r#"{"metadata":{"n":Infinity},"weight_map":{}}"#, "expected value"),
        ("half a surrogate pair", r#"{"weight_map":{"\ud800":"a.safetensors"}}"#, "hex escape"),
        ("the map twice", r#"{"weight_map":{},"weight_map":{"w":"a.safetensors"}}"#, "`weight_map` is there twice"),
        ("metadata twice", r#"{"metadata":{},"metadata":{},"weight_map":{}}"#, "`metadata` is there twice"),
        ("a tensor twice", r#"{"weight_map":{"w":"a.safetensors","w":"a.safetensors"}}"#, "`w` is there twice"),
        ("a tensor in two files", r#"{"weight_map":{"w":"a.safetensors","w":"b.safetensors"}}"#, "`w` is there twice"),
        (
            "one name spelled in two ways",
            r#"{"weight_map":{"w":"a.safetensors","\u0077":"b.safetensors"}}"#,
            "`w` is there twice",
        ),
        ("two sizes", r#"{"metadata":{"total_size":1,"total_size":2},"weight_map":{}}"#, "`total_size` is there twice"),
        ("a note twice", r#"{"metadata":{"n":1,"n":2},"weight_map":{}}"#, "`n` is there twice"),
        ("a note in a note twice", r#"{"metadata":{"n":{"m":1,"m":1}},"weight_map":{}}"#, "`m` is there twice"),
        ("an unknown key twice", r#"{"x":1,"x":1,"weight_map":{}}"#, "`x` is there twice"),
    ]
    .map(|(name, text, part)| (name, text.to_owned(), part))
    .into_iter()
    .chain([
        ("lists in lists", format!(r#"{{"metadata":{{"n":{}"#, "[".repeat(100_000)), "recursion limit"),
        ("objects in objects", format!(r#"{{"metadata":{}"#, r#"{"n":"#.repeat(100_000)), "recursion limit"),
    ])
    .collect()
}

fn values() -> Vec<Case> {
    let size = |size: &str| format!(r#"{{"metadata":{{"total_size":{size}}},"weight_map":{{}}}}"#);
    let file = |file: &str| format!(r#"{{"weight_map":{{"w":{file}}}}}"#);
    let map = |map: &str| format!(r#"{{"weight_map":{map}}}"#);
    vec![
        ("no map", "{}".into(), "missing field `weight_map`"),
        ("metadata alone", r#"{"metadata":{"total_size":4}}"#.into(), "missing field `weight_map`"),
        ("a map that is null", map("null"), "invalid type: null"),
        ("a map that is a list", map(r#"[["w","a.safetensors"]]"#), "invalid type: sequence"),
        ("a map that is a text", map(r#""a.safetensors""#), "invalid type: string"),
        ("a map that is a number", map("1"), "invalid type: integer"),
        ("a file that is null", file("null"), "invalid type: null"),
        ("a file that is a number", file("1"), "invalid type: integer"),
        ("a file that is a list", file(r#"["a.safetensors"]"#), "invalid type: sequence"),
        ("a file that is an object", file("{}"), "invalid type: map"),
        ("a file that is true", file("true"), "invalid type: boolean"),
        ("metadata that are a list", r#"{"metadata":[1],"weight_map":{}}"#.into(), "invalid type: sequence"),
        ("a size of 1e999", size("1e999"), "number out of range"),
        ("a note of 1e999", r#"{"metadata":{"n":1e999},"weight_map":{}}"#.into(), "number out of range"),
    ]
}

fn paths() -> Vec<Case> {
    let file = |file: &str| format!(r#"{{"weight_map":{{"w":"{file}"}}}}"#);
    let tensor = |name: &str| format!(r#"{{"weight_map":{{"{name}":"a.safetensors"}}}}"#);
    let outside = "a file must lie in the folder of the index itself";
    vec![
        ("a file of the folder above", file("../a.safetensors"), outside),
        ("a file far above", file("../../../../etc/passwd"), outside),
        ("an absolute path", file("/etc/passwd"), outside),
        ("a device", file("/dev/zero"), outside),
        ("a file of a folder below", file("below/a.safetensors"), outside),
        ("a path that comes back", file("below/../a.safetensors"), outside),
        ("the folder itself", file("."), outside),
        ("the folder above", file(".."), outside),
        ("no name", file(""), outside),
        ("a backslash", file(r"..\\a.safetensors"), outside),
        ("a NUL", file(r"a.safetensors\u0000"), outside),
        ("a line break", file(r"a\n.safetensors"), outside),
        ("a name that clears the screen", file(r"\u001b[2Ja.safetensors"), outside),
        ("a name longer than any file's", file(&"a".repeat(256)), outside),
        ("a name of 1 MB", file(&"a".repeat(1_000_000)), outside),
        ("a bell in the name of a tensor", tensor(r"\u0007"), "control characters"),
        ("a tensor's name of 1 MB", tensor(&"n".repeat(1_000_000)), "1000000 bytes long"),
        ("a file that is not there", file("b.safetensors"), "no such file beside it"),
        ("a tensor that is not there", tensor("v"), "in a.safetensors"),
        ("a tensor of a long name that is not there", tensor(&"n".repeat(1000)), "nnn..."),
    ]
}
