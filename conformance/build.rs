//! Lets this package's tests and examples find libtorch at run time, and writes the cells of the notebook as a function that a test compiles.

use std::error::Error;
use std::path::Path;
use std::{env, fs};

const NOTEBOOK: &str = "../examples/notebook/launch.ipynb";

fn main() -> Result<(), Box<dyn Error>> {
    if let Ok(dir) = env::var("DEP_TORCH_EXT_LIBDIR") {
        println!("cargo::rustc-link-arg=-Wl,-rpath,{dir}");
    }
    println!("cargo::rerun-if-changed={NOTEBOOK}");
    let notebook: serde_json::Value = serde_json::from_str(&fs::read_to_string(NOTEBOOK)?)?;
    let cells = notebook["cells"].as_array().ok_or("the notebook has no cells")?;
    let mut code = String::new();
    for cell in cells.iter().filter(|cell| cell["cell_type"] == "code") {
        let lines = cell["source"].as_array().ok_or("a cell has no lines")?.iter().filter_map(|line| line.as_str());
        // What begins with a colon is said to the kernel.
        code.extend(lines.filter(|line| !line.starts_with(':')));
        code.push('\n');
    }
    // It exports a symbol, of which a program has one, and a kernel one for each cell. The test has a macro in its place.
    let code = code.replace("accelerate::workers!", "workers!");
    let text = format!("fn cells() -> Result<(), Box<dyn std::error::Error>> {{\n{code}Ok(())\n}}\n");
    Ok(fs::write(Path::new(&env::var("OUT_DIR")?).join("notebook_cells.rs"), text)?)
}
