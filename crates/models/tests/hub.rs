//! Names of the Hugging Face Hub, as programs give them: in processes of their own, because variables say where the cache is.
#![allow(clippy::unwrap_used)]

use accelerate::checkpoint::save_model_weights;
use accelerate::nn::{Module, ParamStore};
use accelerate::tch::Device;
use accelerate_models::gpt2::{GPT2Config, GPT2LMHeadModel};
use accelerate_models::{LoadOptions, PretrainedConfig, PretrainedModel};
use std::path::Path;
use std::process::{Command, Output};
use std::{env, fs};

/// What the process of a test is to load.
const NAME: &str = "ACCELERATE_TEST_HUB_NAME";

fn config() -> GPT2Config {
    GPT2Config { vocab_size: 40, n_embd: 8, n_layer: 1, n_head: 2, n_positions: 16, ..Default::default() }
}

fn save(folder: &Path) {
    let model = GPT2LMHeadModel::new(&ParamStore::new(Device::Cpu).root(), &config()).unwrap();
    save_model_weights(model.params(), folder, &Default::default()).unwrap();
    fs::write(folder.join("config.json"), config().to_json().unwrap()).unwrap();
}

fn load(name: &str, home: &Path, variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", "the_process_of_the_others", "--nocapture"]).env(NAME, name).env("HF_HOME", home);
    command.env_remove("HF_HUB_CACHE").env_remove("HF_HUB_OFFLINE").envs(variables.iter().copied());
    command.output().unwrap()
}

#[test]
fn the_process_of_the_others() {
    let Ok(name) = env::var(NAME) else { return };
    match GPT2LMHeadModel::from_pretrained(name, &LoadOptions::default()) {
        Ok((model, report)) => {
            assert!(report.missing_keys.is_empty() && report.unexpected_keys.is_empty());
            println!("loaded {}", model.params().num_parameters());
        }
        Err(error) => println!("error: {error}"),
    }
}

fn text(output: Output) -> String {
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_name_is_found_in_the_cache_of_python() {
    let home = tempfile::tempdir().unwrap();
    let repository = home.path().join("hub/models--owner--tiny");
    let snapshot = repository.join("snapshots/0a1b");
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir_all(repository.join("refs")).unwrap();
    fs::write(repository.join("refs/main"), "0a1b").unwrap();
    save(&snapshot);
    // Without the feature, nothing is asked over the network; with it, only this says so.
    let found = text(load("owner/tiny", home.path(), &[("HF_HUB_OFFLINE", "1")]));
    assert!(found.contains("loaded "), "{found}");
    let found = text(load("owner/other", home.path(), &[("HF_HUB_OFFLINE", "1")]));
    assert!(found.contains("error: \"owner/other\" is no folder") && found.contains("HF_HUB_OFFLINE"), "{found}");
}

#[test]
fn a_missing_folder_is_told_as_one() {
    let home = tempfile::tempdir().unwrap();
    let found = text(load("./no/such/folder", home.path(), &[]));
    assert!(found.contains("error: \"./no/such/folder\" is no folder on this machine"), "{found}");
}

#[cfg(not(feature = "hub"))]
#[test]
fn without_the_feature_the_error_says_what_to_do() {
    let home = tempfile::tempdir().unwrap();
    let found = text(load("owner/tiny", home.path(), &[]));
    assert!(found.contains("feature `hub` of accelerate-models") && found.contains("owner/tiny"), "{found}");
}
