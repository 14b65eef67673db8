//! Models of the Hub, from a server that each test starts on this machine.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use rstest::rstest;

use crate::estimate_memory::{MODEL, estimate, file_of, with_header, write};
use crate::support::{Finished, accelerate, finished};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const TOKEN: &str = "hf_not-to-be-seen";
/// Nobody listens there.
const NOBODY: &str = "http://127.0.0.1:1";

#[derive(Clone, Debug)]
struct Request {
    path: String,
    /// Names in small letters.
    headers: BTreeMap<String, String>,
}

impl Request {
    fn read(stream: &TcpStream) -> Option<Self> {
        let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
        let path = lines.next()?.split(' ').nth(1)?.to_owned();
        let headers = lines.take_while(|line| !line.is_empty());
        let pair = |line: String| line.split_once(": ").map(|(name, value)| (name.to_lowercase(), value.to_owned()));
        Some(Self { path, headers: headers.filter_map(pair).collect() })
    }

    fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }

    /// First and last byte that are asked for.
    fn range(&self) -> Option<(usize, usize)> {
        let (first, last) = self.header("range")?.strip_prefix("bytes=")?.split_once('-')?;
        Some((first.parse().ok()?, last.parse().ok()?))
    }
}

/// Says of each request what is written. It serves until the test ends.
struct Server {
    address: String,
    requests: Arc<Mutex<Vec<Request>>>,
}

impl Server {
    fn start(answer: impl Fn(&Request, &mut TcpStream) + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::new()));
        let (seen, answer) = (requests.clone(), Arc::new(answer));
        thread::spawn(move || {
            for mut stream in listener.incoming().map_while(Result::ok) {
                let (seen, answer) = (seen.clone(), answer.clone());
                thread::spawn(move || {
                    if let Some(request) = Request::read(&stream) {
                        seen.lock().unwrap().push(request.clone());
                        answer(&request, &mut stream);
                    }
                });
            }
        });
        Self { address, requests }
    }

    fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().clone()
    }
}

/// Whoever has hung up does not want the rest.
fn send(stream: &mut TcpStream, status: &str, headers: &[&str], body: &[u8]) {
    let lines: String = headers.iter().map(|line| format!("{line}\r\n")).collect();
    let head = format!("HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {}\r\n{lines}\r\n", body.len());
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
}

/// As a file server does, with ranges.
fn send_file(request: &Request, stream: &mut TcpStream, bytes: &[u8]) {
    match request.range() {
        None => send(stream, "200 OK", &[], bytes),
        Some((first, _)) if first >= bytes.len() => send(stream, "416 Range Not Satisfiable", &[], b""),
        Some((first, last)) => {
            let last = last.min(bytes.len() - 1);
            let range = format!("Content-Range: bytes {first}-{last}/{}", bytes.len());
            send(stream, "206 Partial Content", &[&range], &bytes[first..=last]);
        }
    }
}

type Files = Vec<(&'static str, Vec<u8>)>;

fn info(files: &Files) -> String {
    let siblings: Vec<_> = files.iter().map(|(name, _)| serde_json::json!({ "rfilename": name })).collect();
    serde_json::json!({ "sha": COMMIT, "siblings": siblings, "gated": false }).to_string()
}

/// The model `org/model` with these files.
fn answer_as_hub(files: &Files, request: &Request, stream: &mut TcpStream) {
    if request.path == "/api/models/org/model/revision/main" {
        return send(stream, "200 OK", &["Content-Type: application/json"], info(files).as_bytes());
    }
    let name = request.path.strip_prefix(&format!("/org/model/resolve/{COMMIT}/"));
    match files.iter().find(|(known, _)| Some(*known) == name) {
        Some((_, bytes)) => send_file(request, stream, bytes),
        None => send(stream, "404 Not Found", &["X-Error-Code: EntryNotFound"], b"not found"),
    }
}

fn hub(files: Files) -> Server {
    Server::start(move |request, stream| answer_as_hub(&files, request, stream))
}

/// A Hub on which requests that `is_meant` are answered in another way.
fn hub_but(
    is_meant: impl Fn(&Request) -> bool + Send + Sync + 'static,
    answer: impl Fn(&Request, &mut TcpStream) + Send + Sync + 'static,
) -> Server {
    Server::start(move |request, stream| match is_meant(request) {
        true => answer(request, stream),
        false => answer_as_hub(&single(), request, stream),
    })
}

fn is_info(request: &Request) -> bool {
    request.path.starts_with("/api/")
}

fn is_weights(request: &Request) -> bool {
    request.path.ends_with(".safetensors")
}

fn single() -> Files {
    vec![("model.safetensors", file_of(&MODEL)), ("config.json", CONFIG.into())]
}

fn sharded() -> Files {
    let (first, second) = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors");
    let index = format!(
        r#"{{"weight_map": {{"h.10.weight": "{first}", "embed.weight": "{first}", "h.9.weight": "{second}", "ids": "{second}"}}}}"#
    );
    vec![
        (first, file_of(&MODEL[..2])),
        (second, file_of(&MODEL[2..])),
        ("model.safetensors.index.json", index.into()),
        ("onnx/other.safetensors", Vec::new()),
    ]
}

const CONFIG: &str = r#"{"model_type": "gpt2", "n_layer": 2, "n_embd": 10, "n_head": 2, "vocab_size": 100}"#;

fn ask(endpoint: &str, folder: &Path, line: &str, variables: &[(&str, &str)]) -> Finished {
    let mut command: Command = accelerate();
    command.arg("estimate-memory").args(line.split_whitespace()).current_dir(folder);
    for name in ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy", "HF_TOKEN"] {
        command.env_remove(name);
    }
    command.env("HF_ENDPOINT", endpoint).env("HF_HOME", folder.join("hf")).envs(variables.iter().copied());
    let found = finished(command);
    assert!(!found.stderr.contains("panicked") && !format!("{found:?}").contains(TOKEN), "{found:?}");
    found
}

#[test]
fn only_headers_of_a_model_of_the_hub_are_fetched() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "model.safetensors", file_of(&MODEL));
    let line = "--plan --num_processes 2 --verbose";
    let local = estimate(folder.path(), &format!("model.safetensors {line}"));
    for files in [single(), sharded()] {
        let server = hub(files.clone());
        let found = ask(&server.address, folder.path(), &format!("org/model {line}"), &[]);
        found.expect(0, &["org/model is on the Hub, and only headers were fetched", COMMIT]);
        assert_eq!(found.stdout, local.stdout);
        for (name, bytes) in
            files.iter().filter(|(name, _)| name.starts_with("model") && name.ends_with(".safetensors"))
        {
            let requests = server.requests();
            let of_file = requests.iter().filter(|request| request.path.ends_with(name));
            let ranges: Vec<_> = of_file.map(|request| request.range().unwrap()).collect();
            let header_bytes = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            assert_eq!(ranges, [(0, 7), (8, 7 + header_bytes)], "{name}");
        }
        assert!(server.requests().iter().all(|request| request.header("authorization").is_none()));
    }
}

#[test]
fn json_says_where_the_model_was_found() {
    let folder = tempfile::tempdir().unwrap();
    let server = hub(single());
    let line = "org/model --json --dtypes float16 --batch_size 3 --sequence_length 4";
    let found = ask(&server.address, folder.path(), line, &[]);
    found.expect(0, &[]);
    let json: serde_json::Value = serde_json::from_str(&found.stdout).unwrap();
    let place = format!("{}/org/model/resolve/{COMMIT}", server.address);
    assert_eq!(json["model"], serde_json::json!({ "origin": "hub", "place": place }));
    let layers = 2 * (34 * 12 * 10 + 5 * 2 * 4 * 4 * 3);
    let wanted = serde_json::json!({ "layers": layers, "embeddings": 5 * 12 * 10, "logits": 4 * 12 * 100 });
    assert_eq!(json["estimates"][0]["activations"], wanted);
}

/// The endpoint redirects within itself, and to another server that has the files.
#[test]
fn a_token_is_sent_to_its_own_server_only() {
    let folder = tempfile::tempdir().unwrap();
    let files = Server::start(|request, stream| send_file(request, stream, &file_of(&MODEL)));
    let elsewhere = files.address.clone();
    let server = Server::start(move |request, stream| match request.path.as_str() {
        "/api/models/model/revision/main" => {
            send(stream, "307 Temporary Redirect", &["Location: /api/models/org/model/revision/main"], b"");
        }
        path if path.ends_with(".safetensors") => {
            send(stream, "302 Found", &[&format!("Location: {elsewhere}/signed?signature=secret")], b"");
        }
        _ => answer_as_hub(&single(), request, stream),
    });
    ask(&server.address, folder.path(), "model", &[("HF_TOKEN", TOKEN)]).expect(0, &[]);
    let is_sent = |request: &Request| request.header("authorization") == Some(&format!("Bearer {TOKEN}"));
    assert_eq!(server.requests().len(), 4);
    assert!(server.requests().iter().all(is_sent), "{:?}", server.requests());
    assert_eq!(files.requests().len(), 2);
    assert!(!files.requests().iter().any(|request| request.headers.contains_key("authorization")));
    assert!(files.requests().iter().all(|request| request.path == "/signed?signature=secret"));
}

#[test]
fn the_token_of_a_login_is_sent_too() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("hf")).unwrap();
    write(&folder.path().join("hf"), "token", format!("{TOKEN}\n"));
    let server = hub(single());
    ask(&server.address, folder.path(), "org/model", &[]).expect(0, &[]);
    let wanted = format!("Bearer {TOKEN}");
    assert!(server.requests().iter().all(|request| request.header("authorization") == Some(&wanted)));
}

#[rstest]
#[case::absent("401 Unauthorized", "RepoNotFound", "", &["answered 401: there is no such model, or it is private", "set HF_TOKEN"])]
#[case::private("401 Unauthorized", "", TOKEN, &["the token that was sent", "is not enough"])]
#[case::gated("403 Forbidden", "GatedRepo", "", &["answered 403: the model is gated; accept its conditions at", "/org/model", "hf auth login"])]
#[case::forbidden("403 Forbidden", "", TOKEN, &["answered 403: it may not be read"])]
#[case::missing("404 Not Found", "", "", &["answered 404: there is no such model or file", "owner/name"])]
#[case::often("429 Too Many Requests", "", "", &["answered 429: too many requests; wait"])]
#[case::fault("503 Service Unavailable", "", "", &["answered 503: the server has a fault; try again"])]
#[case::teapot("418 I'm a teapot", "", "", &["answered 418: this was not expected", "HF_ENDPOINT"])]
fn refusals_say_what_to_do(
    #[case] status: &'static str,
    #[case] code: &str,
    #[case] token: &str,
    #[case] words: &[&str],
) {
    let folder = tempfile::tempdir().unwrap();
    let code = format!("X-Error-Code: {code}");
    let server = hub_but(is_info, move |_, stream| send(stream, status, &[&code], b"<html>words of the server</html>"));
    let found = ask(&server.address, folder.path(), "org/model", &[("HF_TOKEN", token)]);
    found.expect(1, words);
    found.expect(1, &[&format!("{}/api/models/org/model/revision/main", server.address)]);
    assert!(!found.stderr.contains("words of the server"), "{}", found.stderr);
}

/// Which requests are answered wrongly, with what, and what is said of it.
#[rstest]
#[case::portal(is_info, "200 OK", &["Content-Type: text/html; charset=utf-8"], "<html>", "asks for a login")]
#[case::portal_in_place_of_weights(is_weights, "200 OK", &["Content-Type: text/html"], "<html>", "asks for a login")]
#[case::no_json(is_info, "200 OK", &[], "hello", "cannot be understood: expected value")]
#[case::no_text(is_info, "200 OK", &[], "\u{0}", "cannot be understood")]
#[case::no_files(is_info, "200 OK", &[], r#"{"sha": "abc"}"#, "missing field `siblings`")]
#[case::leading_out(is_info, "200 OK", &[], r#"{"sha": "../abc", "siblings": []}"#, "not that of a commit")]
#[case::empty(is_info, "200 OK", &[], r#"{"sha": "abc", "siblings": []}"#, "has no weights to choose")]
#[case::pickle(
    is_info, "200 OK", &[], r#"{"sha": "abc", "siblings": [{"rfilename": "pytorch_model.bin"}, {"rfilename": "config.json"}]}"#,
    "/org/model/resolve/abc/pytorch_model.bin is in PyTorch's own format"
)]
#[case::no_ranges(is_weights, "200 OK", &[], "12345678", "sends files as a whole only")]
#[case::no_range(is_weights, "206 Partial Content", &[], "12345678", "was asked for bytes 0-7")]
#[case::another_range(is_weights, "206 Partial Content", &["Content-Range: bytes 1-8/100"], "12345678", "\"bytes 1-8/100\"")]
#[case::short(is_weights, "206 Partial Content", &["Content-Range: bytes 0-7/100"], "123", "sent 3 bytes as")]
#[case::long(is_weights, "206 Partial Content", &["Content-Range: bytes 0-7/100"], "123456789", "more than 8 bytes")]
#[case::in_circles(is_info, "302 Found", &["Location: /api/models/org/model/revision/main"], "", "it leads on and on")]
#[case::to_nowhere(is_info, "302 Found", &[], "", "an address of http or https is wanted")]
#[case::to_a_file(is_info, "302 Found", &["Location: file:///etc/passwd"], "", "leads to file:///etc/passwd")]
#[case::unreachable(is_info, "302 Found", &["Location: http://127.0.0.1:1/x?signature=secret"], "", "http://127.0.0.1:1/x cannot be")]
#[case::endless_header(
    is_weights, "206 Partial Content", &["Content-Range: bytes 0-7/100"], "\u{7f}\u{7f}\u{7f}\u{7f}\u{7f}\u{7f}\u{7f}\u{7f}",
    "more than the 100000000 allowed"
)]
#[case::longer_than_the_file(
    is_weights, "206 Partial Content", &["Content-Range: bytes 0-7/100"], "\u{7f}\u{0}\u{0}\u{0}\u{0}\u{0}\u{0}\u{0}",
    "claims 127 bytes, but the file has only 100"
)]
fn wrong_answers_are_told_from_models(
    #[case] is_meant: fn(&Request) -> bool,
    #[case] status: &'static str,
    #[case] headers: &'static [&'static str],
    #[case] body: &'static str,
    #[case] words: &str,
) {
    let folder = tempfile::tempdir().unwrap();
    let server = hub_but(is_meant, move |_, stream| send(stream, status, headers, body.as_bytes()));
    let found = ask(&server.address, folder.path(), "org/model", &[("HF_TOKEN", TOKEN)]);
    found.expect(1, &["accelerate estimate-memory: error: ", words]);
    assert!(!found.stderr.contains("signature"), "{}", found.stderr);
}

/// What a server does to the connection, and what is said of it.
#[rstest]
#[case::hangs_up(|_: &mut TcpStream| {}, "cannot be reached")]
#[case::no_http(|stream: &mut TcpStream| { let _ = stream.write_all(b"220 mail.example ESMTP\r\n"); }, "cannot be understood: protocol")]
#[case::cut_off(
    |stream: &mut TcpStream| { let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{\"sha\""); },
    "broke off after 6 bytes"
)]
#[case::endless(|stream: &mut TcpStream| endless(stream, "HTTP/1.1 200 OK\r\n\r\n", &[b' '; 65_536]), "has more than 20000000 bytes")]
#[case::endless_lines(|stream: &mut TcpStream| endless(stream, "HTTP/1.1 200 OK\r\n", b"X-Pad: pad\r\n"), "cannot be understood: ")]
#[case::drips(|stream: &mut TcpStream| drip(stream, "HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"), "within 1 s")]
#[case::drips_lines(|stream: &mut TcpStream| drip(stream, "HTTP/1.1 200 OK\r\nX-Slow: "), "within 1 s")]
#[case::silent(|stream: &mut TcpStream| { let _ = BufReader::new(stream).lines().next(); }, "within 1 s")]
fn servers_that_do_harm_are_left(#[case] harm: fn(&mut TcpStream), #[case] words: &str) {
    let folder = tempfile::tempdir().unwrap();
    let server = hub_but(is_info, move |_, stream| harm(stream));
    let found = ask(&server.address, folder.path(), "org/model", &[("HF_HUB_DOWNLOAD_TIMEOUT", "1")]);
    found.expect(1, &[&format!("{}/api/models/org/model/revision/main", server.address), words]);
}

fn endless(stream: &mut TcpStream, head: &str, again: &[u8]) {
    let _ = stream.write_all(head.as_bytes());
    while stream.write_all(again).is_ok() {}
}

/// A byte at a time, each sooner than anybody loses patience.
fn drip(stream: &mut TcpStream, head: &str) {
    let _ = stream.write_all(head.as_bytes());
    while stream.write_all(b" ").is_ok() {
        thread::park_timeout(Duration::from_millis(50));
    }
}

#[rstest]
#[case(NOBODY, &[], &["http://127.0.0.1:1/api/models/org/model/revision/main cannot be reached", "HTTPS_PROXY", "caused by: "])]
#[case("http://", &[], &["HF_ENDPOINT is not an address of the Hub"])]
#[case("ftp://host", &[], &["HF_ENDPOINT is not an address of the Hub"])]
#[case("http://ada:hf_not-to-be-seen@host", &[], &["HF_ENDPOINT is not an address", "without a user name"])]
#[case(NOBODY, &[("HF_HUB_DOWNLOAD_TIMEOUT", "0")], &["HF_HUB_DOWNLOAD_TIMEOUT is \"0\""])]
#[case(NOBODY, &[("HF_HUB_OFFLINE", "1")], &["org/model is neither a path of this machine nor complete in the cache",
    "HF_HUB_OFFLINE says", "hf download org/model --local-dir model"])]
fn without_a_network_the_cure_is_told(
    #[case] endpoint: &str,
    #[case] variables: &[(&str, &str)],
    #[case] words: &[&str],
) {
    let folder = tempfile::tempdir().unwrap();
    ask(endpoint, folder.path(), "org/model", variables).expect(1, words);
}

/// As huggingface_hub keeps files: links into a folder of contents.
fn cached(home: &Path, files: &Files) {
    let model = home.join("hf/hub/models--org--model");
    for folder in ["refs", "blobs", &format!("snapshots/{COMMIT}")] {
        fs::create_dir_all(model.join(folder)).unwrap();
    }
    write(&model, "refs/main", COMMIT);
    for (name, bytes) in files.iter().filter(|(name, _)| !name.contains('/')) {
        write(&model.join("blobs"), name, bytes);
        symlink(format!("../../blobs/{name}"), model.join("snapshots").join(COMMIT).join(name)).unwrap();
    }
}

#[rstest]
#[case(single(), &[])]
#[case(sharded(), &[("HF_HUB_OFFLINE", "1")])]
fn a_model_in_the_cache_needs_no_network(#[case] files: Files, #[case] variables: &[(&str, &str)]) {
    let folder = tempfile::tempdir().unwrap();
    cached(folder.path(), &files);
    let found = ask(NOBODY, folder.path(), "org/model --dtypes float32", variables);
    found.expect(0, &["org/model is in the cache, so that the Hub was not asked", &format!("snapshots/{COMMIT}")]);
    assert!(found.stdout.contains("808 B"), "{}", found.stdout);
}

/// What of the model is in the cache is not enough, or not to be trusted.
#[rstest]
#[case::no_weights(|home: &Path| cached(home, &vec![("config.json", CONFIG.into())]))]
#[case::other_weights(|home: &Path| cached(home, &vec![("pytorch_model.bin", Vec::new())]))]
#[case::one_shard(|home: &Path| cached(home, &sharded().into_iter().skip(1).collect()))]
#[case::no_commit(|home: &Path| { cached(home, &single()); fs::remove_file(home.join(MAIN)).unwrap(); })]
#[case::a_path_as_commit(|home: &Path| { cached(home, &single()); write(home, MAIN, "../../../.."); })]
#[case::a_folder_as_commit(|home: &Path| {
    cached(home, &single());
    fs::remove_file(home.join(MAIN)).unwrap();
    fs::create_dir(home.join(MAIN)).unwrap();
})]
#[case::a_device_as_commit(|home: &Path| {
    cached(home, &single());
    fs::remove_file(home.join(MAIN)).unwrap();
    symlink("/dev/zero", home.join(MAIN)).unwrap();
})]
fn an_incomplete_cache_is_passed_over(#[case] prepare: fn(&Path)) {
    let folder = tempfile::tempdir().unwrap();
    prepare(folder.path());
    let server = hub(single());
    ask(&server.address, folder.path(), "org/model", &[]).expect(0, &["org/model is on the Hub"]);
    let offline = ask(&server.address, folder.path(), "org/model", &[("HF_HUB_OFFLINE", "1")]);
    offline.expect(1, &["nor complete in the cache"]);
}

const MAIN: &str = "hf/hub/models--org--model/refs/main";

#[test]
fn a_damaged_cache_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    cached(folder.path(), &vec![("model.safetensors", with_header("no header", 0))]);
    ask(NOBODY, folder.path(), "org/model", &[])
        .expect(1, &["model.safetensors is not a safetensors file, or damaged"]);
}

#[test]
fn what_lies_on_this_disk_comes_first() {
    let folder = tempfile::tempdir().unwrap();
    cached(folder.path(), &sharded());
    fs::create_dir_all(folder.path().join("org/model")).unwrap();
    write(&folder.path().join("org/model"), "model.safetensors", file_of(&MODEL[..1]));
    let found = ask(NOBODY, folder.path(), "org/model --dtypes float32", &[]);
    found.expect(0, &["org/model is what lies on this disk, which comes before a model of that name on the Hub"]);
    assert!(found.stdout.contains("200 B"), "{}", found.stdout);
    // A path that cannot be a name of the Hub needs no words.
    assert_eq!(ask(NOBODY, folder.path(), "./org/model", &[]).stderr, "");
}

#[rstest]
#[case(&[], "there is no", "which says how large the activations")]
#[case(&[("config.json", "[]")], "does not say how large the activations", "config.json cannot be understood")]
fn activations_need_the_configuration(
    #[case] config: &[(&'static str, &str)],
    #[case] words: &str,
    #[case] more: &str,
) {
    let folder = tempfile::tempdir().unwrap();
    let mut files: Files = vec![("model.safetensors", file_of(&MODEL))];
    files.extend(config.iter().map(|&(name, text)| (name, text.into())));
    let server = hub(files);
    let found = ask(&server.address, folder.path(), "org/model --batch_size 1 --sequence_length 1", &[]);
    found.expect(1, &[words, more, &format!("/org/model/resolve/{COMMIT}/config.json")]);
}
