//! Empty stand-ins for CUDA libraries.
//!
//! The registry's torch is linked against a dozen CUDA libraries (two gigabytes) and does not load
//! without them, although a CPU run calls none. Each stand-in has the name and the functions that
//! torch looks up; a call to one ends the program. With the real libraries a Python process is
//! slower to start and larger, so races against this one are races against a lighter rival.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::process;

/// What the names of functions of CUDA libraries begin with.
const PREFIXES: [&str; 11] =
    ["nccl", "cudnn", "cublas", "cusparse", "cufft", "curand", "cuFile", "nvshmem", "cusolver", "nvrtc", "nvJitLink"];

/// Builds the missing libraries of the torch in `torch_home` into `folder`.
pub(super) fn build(torch_home: &Path, folder: &Path) -> Result<()> {
    let torch_libraries = shared_libraries(&torch_home.join("torch/lib"));
    let cuda_libraries = shared_libraries(&torch_home.join("nvidia/cu13/lib"));
    let mut present: BTreeSet<String> = BTreeSet::new();
    present.extend(torch_libraries.iter().chain(&cuda_libraries).filter_map(|path| name_of(path)));
    let wanted = process::read(Command::new("readelf").arg("-d").args(&torch_libraries))
        .context("reading torch's libraries needs `readelf`, which comes with the C compiler (binutils)")?;
    let missing: BTreeSet<&str> = needed_names(&wanted).filter(|name| !present.contains(*name)).collect();

    let defined = dynamic_symbols("--defined-only", torch_libraries.iter().chain(&cuda_libraries))?;
    let undefined = dynamic_symbols("--undefined-only", torch_libraries.iter())?;
    let functions: Vec<&str> = undefined
        .iter()
        .filter(|name| is_cuda_function(name) && !defined.contains(*name))
        .map(String::as_str)
        .collect();

    let fresh = folder.with_added_extension("new");
    let _ = fs::remove_dir_all(&fresh);
    fs::create_dir_all(&fresh).with_context(|| format!("could not create {}", fresh.display()))?;
    let source = fresh.join("stand_in.c");
    fs::write(&source, source_text(&functions))?;
    for name in missing {
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-w", &format!("-Wl,-soname,{name}"), "-o"]);
        process::read(compiler.arg(fresh.join(name)).arg(&source))?;
    }
    let _ = fs::remove_dir_all(folder);
    fs::rename(&fresh, folder).with_context(|| format!("could not create {}", folder.display()))
}

fn shared_libraries(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    entries.filter(|path| name_of(path).is_some_and(|name| name.contains(".so"))).collect()
}

fn name_of(path: &Path) -> Option<String> {
    path.file_name().map(|name| name.to_string_lossy().into_owned())
}

/// The `[libname.so.1]` of `(NEEDED)` lines, as far as they are CUDA's.
fn needed_names(readelf: &str) -> impl Iterator<Item = &str> {
    let names = readelf.lines().filter(|line| line.contains("(NEEDED)"));
    names
        .filter_map(|line| line.split_once('[')?.1.strip_suffix(']'))
        .filter(|name| ["libcu", "libnccl", "libnv"].iter().any(|prefix| name.starts_with(prefix)))
}

fn dynamic_symbols<'a>(kind: &str, libraries: impl Iterator<Item = &'a PathBuf>) -> Result<BTreeSet<String>> {
    let listing = process::read(Command::new("nm").args(["--dynamic", kind]).args(libraries))
        .context("reading torch's libraries needs `nm`, which comes with the C compiler (binutils)")?;
    let name = |line: &str| Some(line.split_whitespace().next_back()?.split('@').next()?.to_owned());
    Ok(listing.lines().filter(|line| line.starts_with([' ', '0', '1'])).filter_map(name).collect())
}

fn is_cuda_function(name: &str) -> bool {
    let driver =
        name.strip_prefix("cu").is_some_and(|rest| rest.starts_with(|letter: char| letter.is_ascii_uppercase()));
    driver || PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

fn source_text(functions: &[&str]) -> String {
    let mut text = String::from(
        "#include <stdio.h>\n#include <stdlib.h>\n\
         static void called(const char *name) {\n\
             fprintf(stderr, \"%s: a stand-in for a CUDA library was called\\n\", name);\n    abort();\n}\n",
    );
    for name in functions {
        text.push_str(&format!("void {name}(void) {{ called(\"{name}\"); }}\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuda_libraries_are_picked_from_what_a_library_needs() {
        let readelf = " 0x1 (NEEDED)   Shared library: [libcudnn.so.9]\n\
             0x1 (NEEDED)   Shared library: [libc10.so]\n 0x1 (SONAME) Library soname: [libcufft.so.12]\n\
             0x1 (NEEDED)   Shared library: [libnccl.so.2]\n";
        assert_eq!(needed_names(readelf).collect::<Vec<_>>(), ["libcudnn.so.9", "libnccl.so.2"]);
    }

    #[test]
    fn cuda_functions_are_told_from_others() {
        for name in ["ncclAllReduce", "cublasLtMatmul", "cuDeviceGet", "nvshmemx_mc_ptr", "cuFileRead"] {
            assert!(is_cuda_function(name), "{name}");
        }
        for name in ["curl_easy_init", "_ZN3c104cuda", "memcpy", "cube"] {
            assert!(!is_cuda_function(name), "{name}");
        }
    }

    #[test]
    fn every_function_is_defined_once() {
        let text = source_text(&["ncclSend", "cudnnCreate"]);
        assert_eq!(text.matches("void ncclSend(void)").count(), 1);
        assert_eq!(text.matches("void cudnnCreate(void)").count(), 1);
    }
}
