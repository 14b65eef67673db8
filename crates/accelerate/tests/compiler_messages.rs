//! What the compiler says to a user who forgot something: it names what to write.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use rstest::rstest;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

/// Definitions that the mistakes below use.
const PRELUDE: &str = "
    #![allow(unused)]
    use accelerate::{data::*, nn::*, prelude::*};
    pub struct Example { pub input: Tensor, pub label: Tensor }
    pub struct Net { pub linear: Linear }
";

/// The library that this test was linked with: the latest one that is older than the test, in the folder of both.
fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let changed = |path: &Path| path.metadata().and_then(|metadata| metadata.modified()).unwrap();
    let linked_at = changed(&test);
    let is_library = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy();
        name.starts_with("libaccelerate-") && name.ends_with(".rlib")
    };
    let files = test.parent().unwrap().read_dir().unwrap().map(|entry| entry.unwrap().path());
    let libraries = files.filter(|path| is_library(path) && changed(path) <= linked_at);
    libraries.max_by_key(|path| -> SystemTime { changed(path) }).unwrap()
}

fn compile(code: &str) -> std::process::Output {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("mistake.rs");
    std::fs::write(&source, format!("{PRELUDE}{code}")).unwrap();
    let library = library();
    let mut rustc = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    rustc.args(["--edition", "2024", "--crate-type", "lib", "--emit", "metadata", "--out-dir"]).arg(folder.path());
    rustc.arg("-L").arg(format!("dependency={}", library.parent().unwrap().display()));
    rustc.arg("--extern").arg(format!("accelerate={}", library.display())).arg(source).output().unwrap()
}

#[rstest]
#[case::a_correct_program_compiles(
    "#[derive(TensorTree)] pub struct Row { pub input: Tensor }
    pub fn f(rows: Vec<Row>) { DataLoader::builder(VecDataset::new(rows)).collate_fn(stack_tensors).build(); }",
    &[]
)]
#[case::rows_of_a_loader(
    "pub fn f<D: Dataset<Item = Example> + 'static>(rows: D) { DataLoader::builder(rows).build(); }",
    &["rows of type `Example` become a batch", "`#[derive(TensorTree)]`", "`.collate_fn(stack_tensors)`"]
)]
#[case::rows_of_a_stream(
    "#[derive(Clone)] pub struct Row;
    pub fn f<D: IterableDataset<Item = Row> + 'static>(rows: D) { DataLoader::iterable(rows).build(); }",
    &["rows of type `Row` become a batch", "`#[derive(TensorTree)]`"]
)]
#[case::rows_in_memory(
    "pub fn f(rows: Vec<Example>) { VecDataset::new(rows); }",
    &["`Example` is not known to be made of tensors", "`#[derive(TensorTree)]`"]
)]
#[case::tensors_of_a_data_set(
    "pub fn f(all: Example) { TensorDataset::new(all); }",
    &["`Example` is not known to be made of tensors", "`#[derive(TensorTree)]`"]
)]
#[case::rows_that_are_no_data_set(
    "pub fn f(rows: Vec<Tensor>) { DataLoader::builder(rows); }",
    &["Tensor>` is not a dataset", "`VecDataset::new(rows)`"]
)]
#[case::batches_of_a_prepared_loader(
    "pub fn f(loader: &DataLoaderShard<Example>) { loader.iter(); }",
    &["`Example` is not known to be made of tensors", "`#[derive(TensorTree)]`"]
)]
#[case::gathered(
    "pub fn f(accelerator: &Accelerator, outputs: &Vec<(Tensor, Example)>) { accelerator.gather_for_metrics(outputs); }",
    &["`Example` is not known to be made of tensors", "`#[derive(TensorTree)]`"]
)]
#[case::output_of_a_model(
    "impl Module for Net {
        type Input = Tensor;
        type Output = Example;
        fn forward(&self, input: &Tensor) -> Result<Example> { loop {} }
        fn params(&self) -> &ParamStore { loop {} }
    }",
    &["`Example` is not known to be made of tensors", "`#[derive(TensorTree)]`"]
)]
#[case::output_of_a_closure(
    "pub fn f(store: &ParamStore) { ModuleFn::new(store, |input: &Tensor| -> Result<Example> { loop {} }); }",
    &["`Example` is not known to be made of tensors", "`#[derive(TensorTree)]`"]
)]
#[case::prepared_without_being_a_model(
    "pub fn f(accelerator: &Accelerator, net: Net) { accelerator.prepare(net); }",
    &["`Net` cannot be prepared", "`impl accelerate::nn::Module`"]
)]
#[case::one_of_a_tuple(
    "pub fn f(accelerator: &Accelerator, net: Net, optimizer: AdamW) { accelerator.prepare((net, optimizer)); }",
    &["cannot be prepared", "which member of a tuple", "`impl accelerate::nn::Module`"]
)]
#[case::clipped_without_being_a_model(
    "pub fn f(accelerator: &Accelerator, net: &Net) { accelerator.clip_grad_norm_(net, 1.0); }",
    &["`Net` has no parameters that are known here", "`impl accelerate::nn::Module`"]
)]
fn what_was_forgotten_is_named(#[case] code: &str, #[case] wanted: &[&str]) {
    let output = compile(code);
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.success(), wanted.is_empty(), "{said}");
    for wanted in wanted {
        assert!(said.contains(wanted), "not said: {wanted}\n{said}");
    }
}
