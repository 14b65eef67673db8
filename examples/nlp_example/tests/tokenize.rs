//! The word-piece tokenizer: training, files, and what the model gets to see.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../../crates/accelerate/tests/hostile/mod.rs"]
#[allow(unreachable_pub, reason = "it is shared by several test programs")]
mod hostile;

use hostile::{Outcome, outcome};
use nlp_example::corpus;
use nlp_example::tokenize::{TextTokenizer, TokenizeError};
use rstest::rstest;

fn trained() -> TextTokenizer {
    let corpus = corpus::generate();
    let texts: Vec<&str> = corpus.train.rows.iter().map(|row| row.text.as_str()).collect();
    TextTokenizer::train(&texts, 8000).unwrap()
}

#[test]
fn every_word_of_the_corpus_is_known() {
    let tokenizer = trained();
    let corpus = corpus::generate();
    let texts: Vec<&str> = corpus.dev.rows.iter().map(|row| row.text.as_str()).collect();
    for (text, encoded) in texts.iter().zip(tokenizer.encode(&texts).unwrap()) {
        let tokens = tokenizer.tokens(&encoded.input_ids);
        assert_eq!(tokens.join(" "), format!("[CLS] {text} [SEP]"), "a word was cut into pieces");
        assert!(encoded.token_type_ids.iter().all(|&id| id == 0));
    }
}

#[test]
fn every_process_trains_the_same_vocabulary() {
    assert_eq!(trained().to_json().unwrap(), trained().to_json().unwrap());
}

#[test]
fn unknown_words_are_cut_into_pieces_and_unknown_letters_become_unk() {
    let tokenizer = trained();
    let tokens = |text| tokenizer.tokens(&tokenizer.encode(&[text]).unwrap()[0].input_ids);
    let pieces = tokens("filmic");
    assert!(pieces.len() > 3 && pieces[2].starts_with("##"), "{pieces:?}");
    assert_eq!(tokens("傑"), ["[CLS]", "[UNK]", "[SEP]"]);
    assert_eq!(tokens("The PLOT!"), ["[CLS]", "the", "plot", "[UNK]", "[SEP]"]);
}

#[test]
fn the_file_holds_everything() {
    let tokenizer = trained();
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), tokenizer.to_json().unwrap()).unwrap();
    let loaded = TextTokenizer::from_folder(folder.path()).unwrap();
    let texts = ["the film is not bad , but i slept", "unheard of zebras"];
    assert_eq!(loaded.encode(&texts).unwrap(), tokenizer.encode(&texts).unwrap());
    assert_eq!(loaded.vocab_size(), tokenizer.vocab_size());
    assert_eq!(loaded.pad_id(), 0);
}

#[test]
fn long_texts_are_cut_and_keep_their_end_mark() {
    let tokenizer = trained().with_max_length(5).unwrap();
    let encoded = tokenizer.encode(&["the film is very long and very dull"]).unwrap();
    assert_eq!(tokenizer.tokens(&encoded[0].input_ids), ["[CLS]", "the", "film", "is", "[SEP]"]);
    let error = tokenizer.with_max_length(2).unwrap_err();
    assert!(matches!(error, TokenizeError::TooShort { found: 2, num_added: 2 }));
}

#[rstest]
#[case::lower_case_by_default(None, &["[CLS]", "good", "film", "[SEP]"])]
#[case::cased(Some("{\"do_lower_case\": false}"), &["[CLS]", "[UNK]", "film", "[SEP]"])]
#[case::other_keys(Some("{\"model_max_length\": 512}"), &["[CLS]", "good", "film", "[SEP]"])]
fn vocabularies_of_the_first_bert_are_read(#[case] config: Option<&str>, #[case] wanted: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let vocabulary = "[PAD]\n[unused0]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\ngood\nfilm\n";
    std::fs::write(folder.path().join("vocab.txt"), vocabulary).unwrap();
    if let Some(config) = config {
        std::fs::write(folder.path().join("tokenizer_config.json"), config).unwrap();
    }
    let tokenizer = TextTokenizer::from_folder(folder.path()).unwrap();
    let encoded = tokenizer.encode(&["Good film"]).unwrap();
    assert_eq!(tokenizer.tokens(&encoded[0].input_ids), wanted);
    assert_eq!((encoded[0].input_ids[0], tokenizer.vocab_size()), (3, 8));
}

#[rstest]
#[case::nothing(&[], "holds neither tokenizer.json nor vocab.txt")]
#[case::no_cls(&[("vocab.txt", "[PAD]\n[UNK]\n[SEP]\ngood\n")], "the token [CLS] is missing")]
#[case::not_json(&[("tokenizer.json", "good\n")], "does not hold a usable tokenizer")]
#[case::other_json(&[("tokenizer.json", "{\"model_type\": \"bert\"}")], "does not hold a usable tokenizer")]
fn folders_without_a_tokenizer_are_refused(#[case] files: &[(&str, &str)], #[case] message: &str) {
    let folder = tempfile::tempdir().unwrap();
    for (name, content) in files {
        std::fs::write(folder.path().join(name), content).unwrap();
    }
    let error = TextTokenizer::from_folder(folder.path()).unwrap_err().to_string();
    assert!(error.contains(message) && error.contains(&folder.path().display().to_string()), "{error}");
}

/// Texts from which a vocabulary is learned within the bounds.
#[track_caller]
fn check_trains(case: &str, text: String) {
    let num_bytes = text.len() as u64;
    let texts = [text, "a good film".to_owned(), "a good plot".to_owned()];
    let trained = outcome(case, std::path::Path::new(""), num_bytes, || TextTokenizer::train(&texts, 8000));
    assert!(matches!(trained, Outcome::Read), "{case}: {trained:?}");
}

#[test]
fn a_word_of_200_000_letters_does_not_stall_training() {
    check_trains("one letter", "a".repeat(200_000));
    check_trains("two letters in turn", "ab".repeat(100_000));
    let mut state = 1u32;
    let letters = std::iter::repeat_with(|| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        char::from(b'a' + (state >> 24) as u8 % 26)
    });
    let mut letters = letters.take(400_000);
    check_trains("letters by chance", letters.by_ref().take(200_000).collect());
    let words: Vec<String> = letters.collect::<Vec<_>>().chunks(100).map(|word| word.iter().collect()).collect();
    check_trains("2000 words of 100 letters", words.join(" "));
    check_trains("half a million marks", "!".repeat(500_000));
    check_trains("marks on one letter", format!("a{}", "\u{301}".repeat(100_000)));
    check_trains("zeros", "\0".repeat(200_000));
}

#[test]
fn a_long_word_does_not_change_the_vocabulary() {
    let texts = ["a good film", "a bad film", "good acting"];
    let with_long: Vec<String> =
        texts.iter().map(|text| (*text).to_owned()).chain(["film".repeat(26), "x".repeat(101)]).collect();
    let vocabulary = TextTokenizer::train(&texts, 100).unwrap();
    let with_long = TextTokenizer::train(&with_long, 100).unwrap();
    assert_eq!(with_long.to_json().unwrap(), vocabulary.to_json().unwrap());
    let encoded = vocabulary.encode(&[&"film".repeat(26)]).unwrap();
    assert_eq!(vocabulary.tokens(&encoded[0].input_ids), ["[CLS]", "[UNK]", "[SEP]"]);
    let longest = TextTokenizer::train(&["x".repeat(100), "a".to_owned()], 100).unwrap();
    assert!(longest.to_json().unwrap().contains("\"##x\""), "a word of 100 letters is learned from");
}
