#![no_main]
//! `config.json` of a model of each kind. What is read has sizes that can be built, and is the same when it is written and read again.

use std::fmt::Debug;
use std::path::Path;

use accelerate_models::PretrainedConfig;
use accelerate_models::bert::BertConfig;
use accelerate_models::gpt2::GPT2Config;
use accelerate_models::llama::LlamaConfig;
use accelerate_models::resnet::ResNetConfig;
use accelerate_models::vit::ViTConfig;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    check::<BertConfig>(text);
    check::<GPT2Config>(text);
    check::<LlamaConfig>(text);
    check::<ResNetConfig>(text);
    if let Some(config) = check::<ViTConfig>(text) {
        assert!(config.num_patches() > 0);
    }
});

fn check<C: PretrainedConfig + Debug + PartialEq>(text: &str) -> Option<C> {
    let path = Path::new("config.json");
    let config = C::from_json(text, path).ok()?;
    assert!(config.check().is_ok());
    let written = config.to_json().expect("a configuration can be written");
    assert_eq!(C::from_json(&written, path).expect("what was written can be read"), config);
    Some(config)
}
