//! Configurations, tokenizers and weights that were made to do harm, or are simply wrong: refused in no time, in little
//! memory, and with a message that names the file and the place.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
#![allow(unreachable_pub, reason = "cases and bounds are modules of several crates")]

#[path = "../../../crates/accelerate/tests/hostile/mod.rs"]
mod hostile;

use accelerate::nn::ParamStore;
use accelerate::tch::{Device, Kind, Tensor};
use accelerate_models::PretrainedConfig;
use accelerate_models::bert::{BertConfig, BertForSequenceClassification, check_sizes, has_classifier, load_weights};
use hostile::{Outcome, check_refused, outcome};
use nlp_example::tokenize::TextTokenizer;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

fn written(folder: &TempDir, name: &str, text: impl AsRef<[u8]>) -> PathBuf {
    let path = folder.path().join(name);
    fs::write(&path, text).unwrap();
    path
}

fn check_config(name: &str, text: impl AsRef<[u8]>, part: &str) {
    let folder = TempDir::new().unwrap();
    let path = written(&folder, "config.json", text);
    check_refused(name, &path, &[part], || BertConfig::from_folder(folder.path()));
}

fn check_tokenizer(name: &str, file: &str, text: impl AsRef<[u8]>, part: &str) {
    let folder = TempDir::new().unwrap();
    let path = written(&folder, file, text);
    check_refused(name, &path, &[part], || TextTokenizer::from_folder(folder.path()));
}

#[test]
fn a_configuration_that_is_no_json_object_is_refused() {
    let cases = [
        ("nothing", "", "EOF while parsing"),
        ("a list", "[]", "invalid type: sequence, expected a JSON object"),
        ("all values as a list", r#"[["Bert"],"bert",10,8]"#, "expected a JSON object"),
        ("null", "null", "invalid type: null"),
        ("a number", "3", "invalid type: integer"),
        ("a text", r#""bert""#, "invalid type: string"),
        ("a byte order mark", "\u{feff}{}", "line 1 column 1"),
        ("two objects", "{}{}", "trailing characters at line 1 column 3"),
        ("a comma too many", r#"{"hidden_size":8,}"#, "trailing comma at line 1 column 18"),
        ("a comment", "{\n// small\n}", "line 2 column 1"),
        ("NaN", r#"{"layer_norm_eps":NaN}"#, "line 1 column 19"),
        ("Infinity", r#"{"layer_norm_eps":Infinity}"#, "line 1 column 19"),
        ("minus Infinity", r#"{"layer_norm_eps":-Infinity}"#, "invalid number at line 1"),
        ("half of it", r#"{"hidden_size":"#, "EOF while parsing"),
        ("YAML", "hidden_size: 8", "line 1 column 1"),
        ("single quotes", "{'hidden_size':8}", "line 1 column 2"),
        ("a size twice", r#"{"hidden_size":8,"hidden_size":16}"#, "\"hidden_size\" is there twice at line 1"),
        ("a key that nobody reads twice", r#"{"use_cache":true,"use_cache":false}"#, "\"use_cache\" is there twice"),
        ("a class twice", r#"{"id2label":{"0":"no","0":"yes"}}"#, "\"0\" is there twice"),
        ("one key spelled in two ways", r#"{"hidden_size":8,"hidden\u005fsize":16}"#, "is there twice"),
    ];
    for (name, text, part) in cases {
        check_config(name, text, part);
    }
    check_config("bytes that are no UTF-8", b"{\"a\":\"\xff\"}", "UTF-8");
    check_config("UTF-16", b"{\0}\0", "line 1 column 2");
    check_config("lists in lists", format!(r#"{{"a":{}"#, "[".repeat(100_000)), "recursion limit");
    check_config("objects in objects", r#"{"a":"#.repeat(100_000), "recursion limit");
    check_config(
        "ten million numbers",
        format!(r#"{{"a":[{}0]}}"#, "0,".repeat(7_900_000)),
        "more than 4000000 values",
    );
    check_config("17 MB", " ".repeat(17_000_000), "17000000 bytes; wanted at most 16000000");
    let many: Vec<String> = (0..600_000).map(|index| format!(r#""k{index}":0"#)).collect();
    check_config("600,000 keys", format!("{{{}}}", many.join(",")), "more than 500000 keys");
}

/// Long because it is one table.
#[test]
fn a_value_of_a_configuration_that_makes_no_model_is_named() {
    let cases = [
        ("layer_norm_eps", "-1", "-1.0; wanted a number from 1e-30 to 1"),
        ("layer_norm_eps", "0", "0.0; wanted"),
        ("layer_norm_eps", "-0", "-0.0; wanted"),
        ("layer_norm_eps", "2", "2.0; wanted"),
        ("layer_norm_eps", "1e-300", "1e-300; wanted"),
        ("layer_norm_eps", "1e300", "1e300; wanted"),
        ("layer_norm_eps", "1e999", "number out of range"),
        ("layer_norm_eps", "true", "invalid type: boolean"),
        ("layer_norm_eps", "null", "invalid type: null"),
        ("layer_norm_eps", "\"1e-12\"", "invalid type: string"),
        ("hidden_dropout_prob", "-0.1", "-0.1; wanted a probability from 0 to 1"),
        ("hidden_dropout_prob", "1.1", "1.1; wanted a probability"),
        ("hidden_dropout_prob", "1e999", "number out of range"),
        ("attention_probs_dropout_prob", "2", "2.0; wanted a probability"),
        ("attention_probs_dropout_prob", "-1e300", "-1e300; wanted a probability"),
        ("classifier_dropout", "-1", "-1.0; wanted a probability"),
        ("classifier_dropout", "false", "invalid type: boolean"),
        ("initializer_range", "-0.02", "-0.02; wanted a number from 0 to 10"),
        ("initializer_range", "1e300", "1e300; wanted a number from 0 to 10"),
        ("num_hidden_layers", "1000000000", "1000000000; wanted a number from 1 to 10000"),
        ("num_hidden_layers", "0", "0; wanted a number from 1"),
        ("num_hidden_layers", "-1", "invalid value: integer `-1`"),
        ("num_hidden_layers", "2.0", "floating point `2.0`"),
        ("num_hidden_layers", "true", "invalid type: boolean"),
        ("num_hidden_layers", "18446744073709551615", "18446744073709551615; wanted"),
        ("num_hidden_layers", "18446744073709551616", "floating point"),
        ("hidden_size", "0", "0; wanted a number from 1"),
        ("hidden_size", "-768", "-768; wanted"),
        ("hidden_size", "770", "a divisor of hidden_size, which is 770"),
        ("hidden_size", "9223372036854775807", "9223372036854775807; wanted"),
        ("hidden_size", "9223372036854775808", "invalid value: integer"),
        ("hidden_size", "1e3", "floating point `1000.0`"),
        ("hidden_size", "[768]", "invalid type: sequence"),
        ("num_attention_heads", "0", "0; wanted a number from 1"),
        ("num_attention_heads", "-12", "-12; wanted"),
        ("num_attention_heads", "5", "5; wanted a divisor of hidden_size, which is 768"),
        ("intermediate_size", "0", "0; wanted"),
        ("intermediate_size", "9000000000", "9000000000; wanted"),
        ("intermediate_size", "10000000", "at most 20000000000 parameters, and these make"),
        ("max_position_embeddings", "0", "0; wanted"),
        ("max_position_embeddings", "-512", "-512; wanted"),
        ("max_position_embeddings", "1000000000000", "1000000000000; wanted"),
        ("type_vocab_size", "0", "0; wanted"),
        ("type_vocab_size", "1000000000", "1000000000; wanted"),
        ("vocab_size", "0", "0; wanted"),
        ("vocab_size", "1000000000000", "1000000000000; wanted a number from 1 to 100000000"),
        ("vocab_size", "100000000", "at most 20000000000 parameters"),
        ("pad_token_id", "-1", "-1; wanted a token from 0"),
        ("pad_token_id", "30522", "30522; wanted a token from 0 to 30521"),
        ("pad_token_id", "null", "invalid type: null"),
        ("model_type", "\"roberta\"", "\"roberta\"; wanted \"bert\""),
        ("model_type", "\"\\u001b[2J\"", "wanted \"bert\""),
        ("position_embedding_type", "\"relative_key\"", "wanted \"absolute\""),
        ("hidden_act", "\"mish\"", "hidden_act: unknown variant `mish`"),
        ("hidden_act", "0", "expected value at line 1 column 15"),
        ("id2label", "{}", "wanted names for 0, 1, 2"),
        ("id2label", "[\"no\",\"yes\"]", "invalid type: sequence"),
        ("id2label", "{\"0\":\"no\",\"2\":\"yes\"}", "[0, 2]; wanted names"),
        ("id2label", "{\"00\":\"no\",\"0\":\"yes\"}", "invalid number"),
        ("id2label", "{\"-1\":\"no\"}", "invalid"),
        ("id2label", "{\"0\":1}", "invalid type: integer"),
        ("architectures", "\"Bert\"", "invalid type: string"),
    ];
    for (key, value, part) in cases {
        check_config(&format!("{key} {value}"), format!("{{\"{key}\":{value}}}"), part);
    }
    let long = "A".repeat(1_000_000);
    check_config("a model type of 1 MB", format!(r#"{{"model_type":"{long}"}}"#), "AAA");
    check_config("an activation of 1 MB", format!(r#"{{"hidden_act":"{long}"}}"#), "AAA");
    check_config("a size of 1 MB", format!(r#"{{"hidden_size":{}}}"#, "9".repeat(1_000_000)), "number out of range");
    check_config("a key of 1 MB twice", format!(r#"{{"{long}":0,"{long}":0}}"#), "is there twice");
    let labels: Vec<String> = (1..100_001).map(|label| format!(r#""{label}":"""#)).collect();
    check_config("100,000 classes from 1", format!(r#"{{"id2label":{{{}}}}}"#, labels.join(",")), "wanted names");
}

#[test]
fn numbers_that_make_sense_are_read_as_they_are_written() {
    let folder = TempDir::new().unwrap();
    let text =
        r#"{"hidden_dropout_prob":0,"attention_probs_dropout_prob":1,"layer_norm_eps":1e-5,"initializer_range":0}"#;
    let path = written(&folder, "config.json", text);
    let outcome = outcome("whole numbers", &path, 0, || BertConfig::from_folder(folder.path()));
    assert!(matches!(outcome, Outcome::Read), "{outcome:?}");
}

/// What it is, how to put it into a place, and what the message has to say.
type Place = (&'static str, fn(&Path), &'static str);

/// What has no end, or is no file.
fn places_without_a_file() -> [Place; 3] {
    [
        ("a device", |path| symlink("/dev/zero", path).unwrap(), "is a device or a pipe"),
        ("a folder", |path| fs::create_dir(path).unwrap(), "is a folder"),
        (
            "a pipe that nobody writes into",
            |path| assert!(Command::new("mkfifo").arg(path).status().unwrap().success()),
            "is a device or a pipe",
        ),
    ]
}

#[test]
fn a_device_a_pipe_or_a_folder_in_the_place_of_a_file_is_named() {
    for (name, put, part) in places_without_a_file() {
        let folder = TempDir::new().unwrap();
        let path = |name: &str| folder.path().join(name);
        put(&path("config.json"));
        check_refused(name, &path("config.json"), &[part], || BertConfig::from_folder(folder.path()));
        written(&folder, "vocab.txt", "[PAD]\n[UNK]\n[CLS]\n[SEP]\ngood\n");
        put(&path("tokenizer_config.json"));
        check_refused(name, &path("tokenizer_config.json"), &[part], || TextTokenizer::from_folder(folder.path()));
        put(&path("tokenizer.json"));
        check_refused(name, &path("tokenizer.json"), &[part], || TextTokenizer::from_folder(folder.path()));
        let other = TempDir::new().unwrap();
        put(&other.path().join("vocab.txt"));
        check_refused(name, &other.path().join("vocab.txt"), &[part], || TextTokenizer::from_folder(other.path()));
    }
}

/// The text of a tokenizer, with other values in some of its places.
fn tokenizer(change: impl FnOnce(&mut serde_json::Value)) -> String {
    let trained = TextTokenizer::train(&["a good film", "a bad film", "a good plot", "a bad plot"], 100).unwrap();
    let mut json = serde_json::from_str(&trained.to_json().unwrap()).unwrap();
    change(&mut json);
    json.to_string()
}

fn piece(name: &str) -> serde_json::Value {
    serde_json::json!({"SpecialToken": {"id": name, "type_id": 0}})
}

/// Long because it is one table.
#[test]
fn a_tokenizer_whose_parts_contradict_each_other_is_refused() {
    type Change = fn(&mut serde_json::Value);
    let cases: Vec<(&str, Change, &str)> = vec![
        (
            "a template without its tokens",
            |json| json["post_processor"]["special_tokens"] = serde_json::json!({}),
            "its template names the token \"[CLS]\", which is not among its special_tokens",
        ),
        (
            "a template with another token",
            |json| json["post_processor"]["single"][0] = piece("[BOS]"),
            "names the token \"[BOS]\"",
        ),
        (
            "a template for pairs with another token",
            |json| json["post_processor"]["pair"][0] = piece("[BOS]"),
            "names the token \"[BOS]\"",
        ),
        (
            "a template with a token of 1 MB",
            |json| json["post_processor"]["single"][0] = piece(&"B".repeat(1_000_000)),
            "names the token \"BBB",
        ),
        (
            "a template without a text",
            |json| json["post_processor"]["single"] = serde_json::json!([piece("[CLS]")]),
            "has the sequences \"\"; wanted A",
        ),
        (
            "a template of single texts with a second one",
            |json| json["post_processor"]["single"][1]["Sequence"]["id"] = "B".into(),
            "has the sequences \"B\"; wanted A",
        ),
        (
            "a template with the text twice",
            |json| json["post_processor"]["single"][0] = json["post_processor"]["single"][1].clone(),
            "has the sequences \"A A\"; wanted A",
        ),
        (
            "a template with an id that no token has",
            |json| json["post_processor"]["special_tokens"]["[CLS]"]["ids"][0] = 4_000_000_000_u32.into(),
            "\"[CLS]\" has the id 4000000000",
        ),
        (
            "a special token with more ids than texts",
            |json| json["post_processor"]["special_tokens"]["[CLS]"]["ids"] = serde_json::json!([1, 2, 3]),
            "has 3 ids and 1 tokens",
        ),
        (
            "BERT's own processor with an id that no token has",
            |json| {
                json["post_processor"] =
                    serde_json::json!({"type": "BertProcessing", "sep": ["[SEP]", 3], "cls": ["[CLS]", 99_999]});
            },
            "\"[CLS]\" has the id 99999",
        ),
        (
            "a wrong template in a sequence of processors",
            |json| {
                json["post_processor"]["special_tokens"] = serde_json::json!({});
                json["post_processor"] =
                    serde_json::json!({"type": "Sequence", "processors": [json["post_processor"].clone()]});
            },
            "which is not among its special_tokens",
        ),
        ("a vocabulary without [UNK]", |json| json["model"]["unk_token"] = "[NONE]".into(), "it fails on a text"),
        (
            "pieces of no length",
            |json| json["pre_tokenizer"] = serde_json::json!({"type": "FixedLength", "length": 0}),
            "its pre_tokenizer has a step \"FixedLength\"",
        ),
        (
            "letters that are doubled forty times",
            |json| {
                let double = serde_json::json!({"type": "Replace", "pattern": {"String": "a"}, "content": "aa"});
                json["normalizer"] = serde_json::json!({"type": "Sequence", "normalizers": vec![double; 40]});
            },
            "its normalizer has 40 steps",
        ),
        (
            "a letter that becomes a megabyte",
            |json| {
                let content = "b".repeat(1_000_000);
                json["normalizer"] =
                    serde_json::json!({"type": "Replace", "pattern": {"String": "a"}, "content": content});
            },
            "its normalizer has a step \"Replace\"",
        ),
        (
            "bytes that are doubled thirty times",
            |json| {
                let bytes = serde_json::json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true,
                    "use_regex": false});
                json["pre_tokenizer"] = serde_json::json!({"type": "Sequence", "pretokenizers": vec![bytes; 30]});
            },
            "its pre_tokenizer has a step \"ByteLevel\"",
        ),
        (
            "a thousand steps",
            |json| {
                let step = serde_json::json!({"type": "Lowercase"});
                json["normalizer"] = serde_json::json!({"type": "Sequence", "normalizers": vec![step; 1000]});
            },
            "its normalizer has 1000 steps",
        ),
        (
            "a model of whole words",
            |json| {
                json["model"] = serde_json::json!({"type": "WordLevel", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]"})
            },
            "its model is of another type; wanted WordPiece",
        ),
        ("no model", |json| json["model"] = serde_json::Value::Null, "tokenizer.json"),
        ("a vocabulary that is a list", |json| json["model"]["vocab"] = serde_json::json!([]), "tokenizer.json"),
        ("a negative id", |json| json["model"]["vocab"]["a"] = (-1).into(), "tokenizer.json"),
        ("an id of 2^32", |json| json["model"]["vocab"]["a"] = (1_u64 << 32).into(), "tokenizer.json"),
        ("an unknown model", |json| json["model"]["type"] = "Wish".into(), "tokenizer.json"),
        ("an unknown version", |json| json["version"] = "9".into(), "Unknown tokenizer version '9'"),
        ("a processor that is a number", |json| json["post_processor"] = 3.into(), "tokenizer.json"),
        ("added tokens that are no list", |json| json["added_tokens"] = 3.into(), "tokenizer.json"),
    ];
    for (name, change, part) in cases {
        check_tokenizer(name, "tokenizer.json", tokenizer(change), part);
    }
}

#[test]
fn a_tokenizer_file_that_is_no_tokenizer_is_refused() {
    let whole = tokenizer(|_| ());
    let twice = whole.replacen('{', r#"{"version":"1.0","#, 1);
    let vocabulary_twice = whole.replacen("\"[UNK]\":1", "\"[UNK]\":1,\"[UNK]\":2", 1);
    assert_ne!(whole, vocabulary_twice);
    let cases: Vec<(&str, String, &str)> = vec![
        ("nothing", String::new(), "EOF while parsing"),
        ("a list", "[]".into(), "expected a JSON object"),
        ("null", "null".into(), "invalid type: null"),
        ("an empty object", "{}".into(), "does not hold a usable tokenizer"),
        ("half of it", whole[..whole.len() / 2].into(), "EOF while parsing"),
        ("a byte order mark", format!("\u{feff}{whole}"), "line 1 column 1"),
        ("something behind it", format!("{whole}x"), "trailing characters"),
        ("a version twice", twice, "\"version\" is there twice"),
        ("a token twice", vocabulary_twice, "\"[UNK]\" is there twice"),
        ("NaN", r#"{"version":NaN}"#.into(), "line 1 column"),
        ("lists in lists", format!(r#"{{"model":{}"#, "[".repeat(100_000)), "recursion limit"),
        ("a version of 1 MB", format!(r#"{{"version":"{}"}}"#, "1".repeat(1_000_000)), "111"),
        ("ten million numbers", format!(r#"{{"added_tokens":[{}0]}}"#, "0,".repeat(10_000_000)), "more than 4000000"),
    ];
    for (name, text, part) in cases {
        check_tokenizer(name, "tokenizer.json", text, part);
    }
    check_tokenizer("bytes that are no UTF-8", "tokenizer.json", b"{\"version\":\"\xff\"}", "UTF-8");
}

#[test]
fn a_vocabulary_that_is_none_is_refused() {
    let lines = |tokens: &[&str]| tokens.join("\n");
    let cases = [
        ("nothing", String::new(), "the token [UNK] is missing"),
        ("no [CLS]", lines(&["[PAD]", "[UNK]", "[SEP]", "good"]), "the token [CLS] is missing"),
        ("no [SEP]", lines(&["[PAD]", "[UNK]", "[CLS]", "good"]), "the token [SEP] is missing"),
        ("no [UNK]", lines(&["[PAD]", "[CLS]", "[SEP]", "good"]), "the token [UNK] is missing"),
        ("a byte order mark before the only [CLS]", "\u{feff}[CLS]\n[SEP]\n[UNK]".to_owned(), "[CLS] is missing"),
        ("one line of 20 MB", "a".repeat(20_000_000), "[UNK] is missing"),
        ("ten million lines", "a\n".repeat(10_000_000), "more than 500000 lines"),
    ];
    for (name, text, part) in cases {
        check_tokenizer(name, "vocab.txt", text, part);
    }
    check_tokenizer("bytes that are no UTF-8", "vocab.txt", b"[CLS]\n\xff\n", "UTF-8");
    let sparse = TempDir::new().unwrap();
    let path = written(&sparse, "vocab.txt", "");
    fs::File::options().write(true).open(&path).unwrap().set_len(1 << 40).unwrap();
    check_refused("1 TiB", &path, &["wanted at most 100000000"], || TextTokenizer::from_folder(sparse.path()));
}

#[test]
fn a_tokenizer_configuration_that_is_none_is_refused() {
    let cases = [
        ("a list", "[false]", "expected a JSON object"),
        ("twice", r#"{"do_lower_case":true,"do_lower_case":false}"#, "\"do_lower_case\" is there twice"),
        ("a number for a boolean", r#"{"do_lower_case":1}"#, "invalid type: integer `1`, expected a boolean"),
        ("null", r#"{"do_lower_case":null}"#, "invalid type: null"),
        ("a text for a boolean", r#"{"do_lower_case":"no"}"#, "invalid type: string"),
    ];
    let folder = TempDir::new().unwrap();
    written(&folder, "vocab.txt", "[PAD]\n[UNK]\n[CLS]\n[SEP]\ngood\n");
    for (name, text, part) in cases {
        let path = written(&folder, "tokenizer_config.json", text);
        check_refused(name, &path, &[part], || TextTokenizer::from_folder(folder.path()));
    }
}

#[test]
fn a_tokenizer_that_fills_every_text_leaves_no_room_for_one() {
    let usual = tokenizer(|_| ());
    let full = tokenizer(|json| {
        let mut pieces = vec![piece("[CLS]"); 20];
        pieces.push(json["post_processor"]["single"][1].clone());
        json["post_processor"]["single"] = pieces.into();
    });
    assert!(TextTokenizer::from_json(&usual).unwrap().with_max_length(16).is_ok());
    let error = TextTokenizer::from_json(&full).unwrap().with_max_length(16).unwrap_err().to_string();
    assert!(error.contains("wanted at least 21"), "{error}");
}

fn small() -> BertConfig {
    BertConfig { hidden_size: 8, intermediate_size: 12, ..BertConfig::small(20, 3, 10) }
}

fn folder_with_model() -> (TempDir, ParamStore) {
    let folder = TempDir::new().unwrap();
    let store = ParamStore::new(Device::Cpu);
    BertForSequenceClassification::new(&store.root(), &small()).unwrap();
    let state: Vec<(String, Tensor)> =
        store.named_parameters().into_iter().map(|(name, param)| (name, param.get().unwrap().detach())).collect();
    Tensor::write_safetensors(&state, folder.path().join("model.safetensors")).unwrap();
    (folder, store)
}

#[test]
fn a_configuration_of_another_size_than_the_weights_is_named_before_a_model_is_built() {
    let (folder, _) = folder_with_model();
    let cases = [
        (BertConfig { num_hidden_layers: 9999, ..small() }, "num_hidden_layers is 9999; wanted 2"),
        (BertConfig { num_hidden_layers: 1, ..small() }, "num_hidden_layers is 1; wanted 2"),
        (BertConfig { vocab_size: 90_000_000, ..small() }, "vocab_size is 90000000; wanted 20"),
        (BertConfig { hidden_size: 16, ..small() }, "hidden_size is 16; wanted 8"),
        (BertConfig { intermediate_size: 13, ..small() }, "intermediate_size is 13; wanted 12"),
        (BertConfig { max_position_embeddings: 11, ..small() }, "max_position_embeddings is 11; wanted 10"),
        (BertConfig { type_vocab_size: 3, ..small() }, "type_vocab_size is 3; wanted 2"),
    ];
    check_sizes(&small(), folder.path()).unwrap();
    for (config, part) in cases {
        check_refused(part, &folder.path().join("config.json"), &[part], || check_sizes(&config, folder.path()));
    }
}

#[test]
fn weights_are_not_read_from_places_that_an_index_may_not_name() {
    let (folder, store) = folder_with_model();
    fs::rename(folder.path().join("model.safetensors"), folder.path().join("a.safetensors")).unwrap();
    let outside = "must lie in the folder of the index itself";
    let cases = [
        (r#"{"weight_map":{"classifier.bias":"../a.safetensors"}}"#, outside),
        (r#"{"weight_map":{"classifier.bias":"/dev/zero"}}"#, outside),
        (r#"{"weight_map":{"w":"a.safetensors","w":"a.safetensors"}}"#, "is there twice"),
        (r#"[{}, {"w":"a.safetensors"}]"#, "invalid type: sequence"),
    ];
    let path = folder.path().join("model.safetensors.index.json");
    for (text, part) in cases {
        fs::write(&path, text).unwrap();
        check_refused(text, &path, &[part], || load_weights(&store, folder.path()));
        check_refused(text, &path, &[part], || has_classifier(folder.path()));
    }
}

#[test]
fn only_the_header_is_read_to_learn_whether_there_is_a_classifier() {
    let folder = TempDir::new().unwrap();
    let num_bytes = 1_u64 << 42;
    let header =
        format!(r#"{{"classifier.weight":{{"dtype":"U8","shape":[{num_bytes}],"data_offsets":[0,{num_bytes}]}}}}"#);
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
    let path = written(&folder, "model.safetensors", &bytes);
    fs::File::options().write(true).open(&path).unwrap().set_len(bytes.len() as u64 + num_bytes).unwrap();
    assert!(has_classifier(folder.path()).unwrap());
    let store = ParamStore::new(Device::Cpu);
    store.root().param("classifier.weight", Tensor::zeros([1], (Kind::Float, Device::Cpu))).unwrap();
    check_refused("4 TiB", folder.path(), &["the model has [1]"], || load_weights(&store, folder.path()));
}
