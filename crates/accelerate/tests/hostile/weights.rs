//! Weight files and indexes that were made to do harm, each with what its refusal has to say. Every reader of such files
//! has to refuse them all.

#![allow(dead_code, reason = "each test program uses its own part of it")]

/// A file that no reader may take.
pub struct HostileFile {
    /// What is wrong with it.
    pub name: String,
    /// What stands in it.
    pub bytes: Vec<u8>,
    /// What the message has to say, beside the name of the file.
    pub part: &'static str,
}

/// A safetensors file with this header.
pub fn file(header: impl AsRef<[u8]>, data_bytes: usize) -> Vec<u8> {
    let header = header.as_ref();
    let mut bytes = [&(header.len() as u64).to_le_bytes()[..], header].concat();
    bytes.resize(bytes.len() + data_bytes, 0);
    bytes
}

/// The header of one tensor `w`, of which these are the values as JSON.
pub fn header(dtype: &str, shape: &str, offsets: &str) -> String {
    format!(r#"{{"w":{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}}}"#)
}

const F32: &str = r#""F32""#;
const JSON: &str = "its header cannot be understood";

/// What is wrong, how to make it, and what the message has to say.
pub type LargeCase = (&'static str, fn() -> Vec<u8>, &'static str);

/// Small files.
pub fn files() -> Vec<HostileFile> {
    [lengths(), syntax(), cut_headers(), duplicates(), fields(), shapes(), offsets(), names(), metadata()]
        .into_iter()
        .flatten()
        .map(|(name, bytes, part)| HostileFile { name: name.to_string(), bytes, part })
        .collect()
}

/// Files that take their time: made one by one.
pub const LARGE_FILES: [LargeCase; 6] = [
    ("one tensor more than is read", || many_tensors(150_001), "more than 150000 tensors"),
    ("a million tensors", || many_tensors(1_000_000), "more than 150000 tensors"),
    ("half a million notes", || file(many_notes(500_001), 0), "more than 300000 keys"),
    ("a name of 90 MB", || file(format!(r#"{{"{}":0}}"#, "n".repeat(90_000_000)), 0), "90000000 bytes long"),
    ("100 MB of blanks", || file(format!("{{{}", " ".repeat(99_999_999)), 0), "EOF"),
    ("an element type of 50 MB", || file(header(&format!("\"{}\"", "F".repeat(50_000_000)), "[1]", "[0,4]"), 4), "FFF"),
];

type Case = (Box<str>, Vec<u8>, &'static str);

fn case(name: impl Into<Box<str>>, bytes: Vec<u8>, part: &'static str) -> Case {
    (name.into(), bytes, part)
}

fn many_tensors(number: usize) -> Vec<u8> {
    let entry = |index| format!(r#""t{index}":{{"dtype":"U8","shape":[1],"data_offsets":[{index},{}]}}"#, index + 1);
    file(format!("{{{}}}", (0..number).map(entry).collect::<Vec<_>>().join(",")), number)
}

fn many_notes(number: usize) -> String {
    let notes: Vec<String> = (0..number).map(|index| format!(r#""n{index}":"""#)).collect();
    format!(r#"{{"__metadata__":{{{}}}}}"#, notes.join(","))
}

fn claim(length: u64, rest: &[u8]) -> Vec<u8> {
    [&length.to_le_bytes()[..], rest].concat()
}

fn lengths() -> Vec<Case> {
    vec![
        case("nothing", vec![], "only 0 bytes"),
        case("one byte", vec![1], "only 1 bytes"),
        case("seven bytes", vec![0; 7], "only 7 bytes"),
        case("a header of no bytes", claim(0, b""), JSON),
        case("a header of one byte", claim(1, b"{"), JSON),
        case("the largest length", claim(u64::MAX, b"{}"), "more than the 100000000 allowed"),
        case("a negative length", claim(1 << 63, b"{}"), "more than the 100000000 allowed"),
        case("a length that overflows with the 8 before it", claim(u64::MAX - 7, b"{}"), "more than the 100000000"),
        case("one more than is allowed", claim(100_000_001, b"{}"), "more than the 100000000 allowed"),
        case("the most that is allowed, of 2", claim(100_000_000, b"{}"), "the file has only 10 in all"),
        case("one byte more than there is", claim(3, b"{}"), "claims 3 bytes, but the file has only 10"),
        case("a length of the other byte order", [&[0, 0, 0, 0, 0, 0, 0, 2], &b"{}"[..]].concat(), "more than"),
        case("a text", b"this is a text and no weights at all".to_vec(), "its header claims"),
        case("an archive of PyTorch", b"PK\x03\x04\x00\x00\x08\x08\x00\x00".to_vec(), "its header claims"),
        case("a GGUF file", b"GGUF\x03\x00\x00\x00\x00\x00\x00\x00".to_vec(), "its header claims"),
        case("an empty page of a web site", b"<!DOCTYPE html><html></html>".to_vec(), "its header claims"),
        case("data without a header for them", file("{}", 1), "it was lengthened"),
        case("data cut off by a byte", file(header(F32, "[2]", "[0,8]"), 7), "it was cut off"),
        case("no data", file(header(F32, "[2]", "[0,8]"), 0), "it was cut off"),
        case("a byte behind the data", file(header(F32, "[2]", "[0,8]"), 9), "it was lengthened"),
        case("two files in one", [file("{}", 0), file("{}", 0)].concat(), "it was lengthened"),
    ]
}

fn syntax() -> Vec<Case> {
    let utf_16: Vec<u8> = header(F32, "[1]", "[0,4]").encode_utf16().flat_map(u16::to_le_bytes).collect();
    let texts: Vec<(&str, String)> = vec![
        ("brackets that do not fit", "{]".into()),
        ("a list", "[]".into()),
        ("a list of lists", r#"[["w","F32",[1],[0,4]]]"#.into()),
        ("null", "null".into()),
        ("a number", "3".into()),
        ("a string", r#""{}""#.into()),
        ("something behind the object", "{}x".into()),
        ("two objects", "{}{}".into()),
        ("a byte order mark", "\u{feff}{}".into()),
        ("a NUL", "{\0}".into()),
        ("single quotes", "{'w':0}".into()),
        ("a comment", "{/* none */}".into()),
        ("a comma too many", r#"{"__metadata__":{},}"#.into()),
        ("a key without quotes", "{w:0}".into()),
        ("NaN", r#"{"w":NaN}"#.into()),
        ("a line break in a key", "{\"a\nb\":0}".into()),
        ("half a surrogate pair", r#"{"\ud800":0}"#.into()),
        ("an unknown escape", r#"{"\x41":0}"#.into()),
        ("lists in lists", format!(r#"{{"w":{}"#, "[".repeat(100_000))),
        ("objects in objects", r#"{"a":"#.repeat(100_000)),
        ("lists in lists in the metadata", format!(r#"{{"__metadata__":{{"n":{}"#, "[".repeat(100_000))),
    ];
    let mut cases: Vec<Case> = texts.into_iter().map(|(name, text)| case(name, file(text, 0), JSON)).collect();
    cases.push(case("UTF-16", file(utf_16, 4), JSON));
    cases.push(case("bytes that are no UTF-8 in a name", file(b"{\"\xff\xfe\":0}", 0), JSON));
    cases.push(case("bytes that are no UTF-8 in a note", file(b"{\"__metadata__\":{\"n\":\"\xc0\xaf\"}}", 0), JSON));
    cases
}

/// Headers that end at every place where something else should come.
fn cut_headers() -> Vec<Case> {
    let whole = header(F32, "[1,2]", "[0,8]");
    let mut ends: Vec<usize> = whole.match_indices(['{', '"', ':', ',', '[', ']', '}']).map(|(at, _)| at + 1).collect();
    // The last of them is the whole header.
    ends.pop();
    ends.into_iter()
        .map(|end| case(format!("a header that ends with {}", &whole[..end]), file(&whole[..end], 8), JSON))
        .collect()
}

fn duplicates() -> Vec<Case> {
    let one = r#"{"dtype":"U8","shape":[2],"data_offsets":[0,2]}"#;
    let next = r#"{"dtype":"U8","shape":[2],"data_offsets":[2,4]}"#;
    let twice = |name: &str, text: String, bytes| case(name, file(text, bytes), "is there twice");
    vec![
        twice("the same tensor twice", format!(r#"{{"w":{one},"w":{one}}}"#), 2),
        twice("two tensors of one name", format!(r#"{{"w":{one},"w":{next}}}"#), 4),
        twice("one name spelled in two ways", format!(r#"{{"w":{one},"\u0077":{next}}}"#), 4),
        twice("a tensor again behind others", format!(r#"{{"w":{one},"v":{next},"w":{one}}}"#), 4),
        twice("metadata twice", r#"{"__metadata__":{},"__metadata__":{}}"#.into(), 0),
        twice("a note twice", r#"{"__metadata__":{"format":"pt","format":"tf"}}"#.into(), 0),
        twice("two element types", r#"{"w":{"dtype":"F32","dtype":"I32","shape":[1],"data_offsets":[0,4]}}"#.into(), 4),
        twice("two shapes", r#"{"w":{"dtype":"F32","shape":[1],"shape":[1,1],"data_offsets":[0,4]}}"#.into(), 4),
        twice("two places", r#"{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"data_offsets":[0,4]}}"#.into(), 4),
    ]
}

fn fields() -> Vec<Case> {
    let of = |name: &str, text: &str, part| case(name, file(text, 4), part);
    let dtype = |name: &str, dtype: &str| case(name, file(header(dtype, "[1]", "[0,4]"), 4), JSON);
    vec![
        of("no element type", r#"{"w":{"shape":[1],"data_offsets":[0,4]}}"#, "missing field `dtype`"),
        of("no shape", r#"{"w":{"dtype":"F32","data_offsets":[0,4]}}"#, "missing field `shape`"),
        of("no place", r#"{"w":{"dtype":"F32","shape":[1]}}"#, "missing field `data_offsets`"),
        of("nothing about a tensor", r#"{"w":{}}"#, "missing field `dtype`"),
        of("a field too many", r#"{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"strides":[1]}}"#, "strides"),
        of("a tensor as a list", r#"{"w":["F32",[1],[0,4]]}"#, "invalid type: sequence"),
        of("a tensor that is null", r#"{"w":null}"#, "invalid type: null"),
        of("a tensor that is a text", r#"{"w":"F32"}"#, "invalid type: string"),
        of("a tensor that is a number", r#"{"w":4}"#, "invalid type: integer"),
        of("a tensor that is true", r#"{"w":true}"#, "invalid type: boolean"),
        dtype("an unknown element type", r#""F7""#),
        dtype("an element type in lower case", r#""f32""#),
        dtype("an element type with a blank", r#""F32 ""#),
        dtype("an empty element type", r#""""#),
        dtype("an element type that is a number", "32"),
        dtype("an element type that is null", "null"),
        dtype("an element type that is a list", r#"["F32"]"#),
        dtype("an element type of 1 MB", &format!("\"{}\"", "F".repeat(1_000_000))),
    ]
}

fn shapes() -> Vec<Case> {
    let of = |name: &str, shape: &str, part| case(name, file(header(F32, shape, "[0,4]"), 4), part);
    let mut cases: Vec<Case> = [
        ("a negative size", "[-1]"),
        ("a size with a fraction", "[1.5]"),
        ("a size as a float", "[1.0]"),
        ("a size of 1e999", "[1e999]"),
        ("a size of minus zero", "[-0]"),
        ("a size as a text", r#"["1"]"#),
        ("a size that is null", "[null]"),
        ("a size that is true", "[true]"),
        ("a size of 2^64", "[18446744073709551616]"),
        ("a size of a thousand digits", &format!("[{}]", "9".repeat(1000))),
        ("a size in a list", "[[1]]"),
        ("a size in hexadecimal", "[0x1]"),
        ("a size with a leading zero", "[01]"),
        ("a shape that is a number", "1"),
        ("a shape that is null", "null"),
        ("a shape that is an object", r#"{"0":1}"#),
        ("a shape that is a text", r#""[1]""#),
        ("65 dims", &format!("[{}1]", "1,".repeat(64))),
        ("a million dims", &format!("[{}1]", "1,".repeat(1_000_000))),
    ]
    .map(|(name, shape)| of(name, shape, JSON))
    .into();
    let uncountable = "no countable number of whole bytes";
    cases.extend([
        of("a size of 2^63", "[9223372036854775808]", uncountable),
        of("a size of 2^64 - 1", "[18446744073709551615]", uncountable),
        of("sizes whose product overflows", "[4294967296,4294967296]", uncountable),
        of("sizes whose product is 0 in 64 bits", "[4294967296,4294967296,4294967296]", uncountable),
        of("elements that can be counted, and their bytes not", "[4611686018427387904]", uncountable),
        of("huge sizes beside a zero", "[0,4294967296,4294967296]", uncountable),
        of("64 huge dims", &format!("[{}1]", "18446744073709551615,".repeat(63)), uncountable),
        of("more elements than data", "[2]", "takes 8 bytes as F32, and its data_offsets are 4 apart"),
        of("fewer elements than data", "[0]", "takes 0 bytes as F32, and its data_offsets are 4 apart"),
        case("a scalar of two elements", file(header(F32, "[]", "[0,8]"), 8), "takes 4 bytes as F32"),
        case("half a byte", file(header(r#""F4""#, "[1]", "[0,1]"), 1), uncountable),
        case("three quarters of a byte", file(header(r#""F6_E2M3""#, "[1]", "[0,1]"), 1), uncountable),
    ]);
    cases
}

fn offsets() -> Vec<Case> {
    let of = |name: &str, offsets: &str| case(name, file(header(F32, "[1]", offsets), 4), JSON);
    let two = |name: &str, first: &str, second: &str, bytes| {
        let entry = |place| format!(r#"{{"dtype":"U8","shape":[2],"data_offsets":{place}}}"#);
        let text = format!(r#"{{"w":{},"v":{}}}"#, entry(first), entry(second));
        case(name, file(text, bytes), "is where it has to begin")
    };
    let place = |name: &str, shape: &str, offsets: &str, bytes| {
        case(name, file(header(F32, shape, offsets), bytes), "is where it has to begin")
    };
    vec![
        of("a place without an end", "[0]"),
        of("a place of three numbers", "[0,4,4]"),
        of("no numbers", "[]"),
        of("a negative begin", "[-4,0]"),
        of("a begin as a float", "[0.0,4]"),
        of("an end of 1e999", "[0,1e999]"),
        of("an end of 2^64", "[0,18446744073709551616]"),
        of("an end as a text", r#"[0,"4"]"#),
        of("an end that is null", "[0,null]"),
        of("a place that is null", "null"),
        of("a place that is an object", r#"{"begin":0,"end":4}"#),
        place("a hole before the first tensor", "[1]", "[4,8]", 8),
        place("an end before the begin", "[1]", "[4,0]", 4),
        place("a begin at the end of all numbers", "[0]", "[18446744073709551615,18446744073709551615]", 4),
        two("a hole between two tensors", "[0,2]", "[3,5]", 5),
        two("tensors that overlap", "[0,2]", "[1,3]", 3),
        two("tensors in one place", "[0,2]", "[0,2]", 2),
        two("tensors that overlap, in the other order", "[1,3]", "[0,2]", 3),
        case("an end of 2^64 - 1", file(header(F32, "[1]", "[0,18446744073709551615]"), 4), "takes 4 bytes as F32"),
        case("an end of 2^63", file(header(F32, "[1]", "[0,9223372036854775808]"), 4), "takes 4 bytes as F32"),
    ]
}

fn names() -> Vec<Case> {
    let of = |name: &str, tensor: &str, part| {
        let text = format!(r#"{{"{tensor}":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}}}"#);
        case(name, file(text, 4), part)
    };
    vec![
        of("a bell in a name", r"a\u0007", "control characters"),
        of("a line break in a name", r"a\nb", "control characters"),
        of("a NUL in a name", r"a\u0000.weight", "control characters"),
        of("a name that clears the screen", r"\u001b[2J", "control characters"),
        of("a control character of Latin 1", "a\u{9b}2J", "control characters"),
        of("a name of 1001 bytes", &"n".repeat(1001), "1001 bytes long"),
        of("a name of 1 MB", &"n".repeat(1_000_000), "1000000 bytes long"),
        of("a name of a million escapes", &r"\u00e9".repeat(1_000_000), "2000000 bytes long"),
    ]
}

fn metadata() -> Vec<Case> {
    let of = |name: &str, text: &str| case(name, file(format!(r#"{{"__metadata__":{text}}}"#), 0), JSON);
    vec![
        of("metadata that are a list", "[]"),
        of("metadata that are a text", r#""pt""#),
        of("metadata that are a number", "1"),
        of("a note that is a number", r#"{"format":1}"#),
        of("a note that is null", r#"{"format":null}"#),
        of("a note that is a list", r#"{"format":["pt"]}"#),
        of("a note that is an object", r#"{"format":{"a":"b"}}"#),
        of("a note of 1e999", r#"{"format":1e999}"#),
        of("a tensor as metadata", r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4]}"#),
    ]
}
