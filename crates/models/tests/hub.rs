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

/// The Hub, as far as a model of a few files needs it.
#[cfg(feature = "hub")]
mod hub {
    use super::*;
    use std::io::{BufRead, BufReader, Write};
    use std::net::{TcpListener, TcpStream};
    use std::path::PathBuf;

    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

    /// Serves the files of a folder as the model `owner/tiny`; returns its address.
    pub(super) fn serve(folder: PathBuf) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        // Ends with the test's process.
        std::thread::spawn(move || listener.incoming().flatten().for_each(|stream| answer(&folder, stream)));
        address
    }

    fn answer(folder: &Path, mut stream: TcpStream) {
        let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
        let request = lines.next().unwrap_or_default();
        lines.take_while(|line| !line.is_empty()).for_each(drop);
        let mut words = request.split([' ', '?']);
        let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let names = || fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let found = match path.strip_prefix("/api/models/owner/tiny") {
            Some(rest) if rest.starts_with("/tree/") => {
                let file =
                    |name: String| format!(r#"{{"type": "file", "path": "{name}", "size": 1, "oid": "{COMMIT}"}}"#);
                Some(format!("[{}]", names().map(file).collect::<Vec<_>>().join(", ")).into_bytes())
            }
            Some(_) => Some(format!(r#"{{"id": "owner/tiny", "sha": "{COMMIT}", "siblings": []}}"#).into_bytes()),
            None => path
                .strip_prefix(&format!("/owner/tiny/resolve/{COMMIT}/"))
                .and_then(|name| fs::read(folder.join(name)).ok()),
        };
        let status = if found.is_some() { "200 OK" } else { "404 Not Found" };
        let body = found.unwrap_or_default();
        let head = format!(
            "HTTP/1.1 {status}\r\ncontent-length: {}\r\netag: \"{}-{}\"\r\nx-repo-commit: {COMMIT}\r\nconnection: close\r\n\r\n",
            body.len(),
            path.len(),
            body.len()
        );
        let body = if method == "HEAD" { &[][..] } else { &body };
        let _ = stream.write_all(&[head.as_bytes(), body].concat());
    }
}

#[cfg(feature = "hub")]
#[test]
fn a_name_is_fetched_once_and_found_again_without_the_network() {
    let (files, home) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    save(files.path());
    fs::write(files.path().join("flax_model.msgpack"), "not needed").unwrap();
    let endpoint = hub::serve(files.path().to_owned());
    let variables = [("HF_ENDPOINT", endpoint.as_str())];
    for variables in [&variables, &variables, &[("HF_HUB_OFFLINE", "1")], &[("HF_ENDPOINT", "http://127.0.0.1:9")]] {
        let found = text(load("owner/tiny", home.path(), variables));
        assert!(found.contains("loaded "), "{variables:?} {found}");
    }
    let folder = home.path().join("hub/models--owner--tiny/snapshots");
    let snapshot = fs::read_dir(folder).unwrap().next().unwrap().unwrap().path();
    assert!(snapshot.join("config.json").exists() && !snapshot.join("flax_model.msgpack").exists());
    let found = text(load("owner/other", home.path(), &variables));
    assert!(found.contains("error: cannot fetch \"owner/other\" from the Hugging Face Hub"), "{found}");
    // Sizes without weights.
    fs::remove_file(files.path().join("model.safetensors")).unwrap();
    let (endpoint, home) = (hub::serve(files.path().to_owned()), tempfile::tempdir().unwrap());
    let found = text(load("owner/tiny", home.path(), &[("HF_ENDPOINT", &endpoint)]));
    assert!(
        found.contains("has no model.safetensors or pytorch_model.bin") && found.contains("config.json"),
        "{found}"
    );
}
