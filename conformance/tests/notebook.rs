//! The notebook of `examples/notebook`, run cell by cell by Rust's kernel for Jupyter.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::{Path, PathBuf};
use std::process::Command;

/// The cells one behind the other, as a kernel compiles them: a call whose types have changed is an error of every build of the tests,
/// and not only where the kernel is.
mod compiled {
    /// In place of the macro that exports a symbol.
    macro_rules! workers {
        ($($function:expr),*) => {{
            $( let _ = $function; )*
            no_workers()
        }};
    }

    fn no_workers() -> accelerate::Workers {
        unreachable!("the cells are compiled and never run")
    }

    include!(concat!(env!("OUT_DIR"), "/notebook_cells.rs"));

    /// Launching needs the kernel: this program's own processes would be tests.
    pub(super) const CELLS: fn() -> Result<(), Box<dyn std::error::Error>> = cells;
}

#[test]
fn the_cells_of_the_notebook_compile() {
    let name = std::any::type_name_of_val(&compiled::CELLS);
    assert!(name.starts_with("fn()"), "{name}");
}

/// Runs every cell in a fresh kernel, and prints what each has shown.
const CLIENT: &str = "
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
place = {'metadata': {'path': sys.argv[2]}}
NotebookClient(notebook, kernel_name='rust', timeout=None, startup_timeout=600, resources=place).execute()
for cell in notebook.cells:
    for output in cell.get('outputs', []):
        print(output.get('text') or output.get('data', {}).get('text/plain', ''))
";

#[test]
fn the_notebook_launches_the_functions_of_its_cells() {
    let variable = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let (Some(kernel), Some(python)) = (variable("ACCELERATE_TEST_EVCXR"), variable("ACCELERATE_TEST_NBCLIENT")) else {
        eprintln!(
            "skipped, because ACCELERATE_TEST_EVCXR and ACCELERATE_TEST_NBCLIENT name no kernel, and no Python with nbclient; \
             `cargo xtask soak notebook` installs both"
        );
        return;
    };
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/notebook").canonicalize().unwrap();
    let jupyter = tempfile::tempdir().unwrap();
    let description = jupyter.path().join("kernels/rust");
    std::fs::create_dir_all(&description).unwrap();
    let argv = [kernel.to_str().unwrap(), "--control_file", "{connection_file}"];
    let description_text = serde_json::json!({"argv": argv, "display_name": "Rust", "language": "rust"}).to_string();
    std::fs::write(description.join("kernel.json"), description_text).unwrap();

    let libtorch = Path::new(&std::env::var_os("LIBTORCH").expect("cargo sets it")).canonicalize().unwrap();
    // What the kernel has compiled stays for the next time.
    let compiled = Path::new(env!("CARGO_TARGET_TMPDIR")).join("evcxr");
    std::fs::create_dir_all(&compiled).unwrap();
    let mut client = Command::new(python);
    client.args(["-c", CLIENT]).arg(folder.join("launch.ipynb")).arg(&folder);
    client.env("JUPYTER_PATH", jupyter.path()).env("EVCXR_TMPDIR", compiled);
    client.env("LD_LIBRARY_PATH", libtorch.join("lib")).env("LIBTORCH", &libtorch).env("OMP_NUM_THREADS", "1");
    let output = client.output().unwrap();
    let said = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(output.status.success(), "{said}");
    let expected = [
        "[rank 0] trained 50 steps as one of 2\n",
        "[rank 1] trained 50 steps as one of 2\n",
        "losses are small: true\n",
        "losses are equal: true\n",
        "fails failed: rank 1 (process ",
        "Error: row 3 has no label",
        "this process holds 1 accelerator, ",
    ];
    for expected in expected {
        assert!(said.contains(expected), "{expected}: {said}");
    }
}
