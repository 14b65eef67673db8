//! The word-piece tokenizer: training, files, and what the model gets to see.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

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
