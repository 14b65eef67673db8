//! `cargo xtask check-cuda`: type-checks what the `cuda` feature adds, and compiles its kernels, on a machine without CUDA.
//!
//! Only headers and the kernels' compiler are needed for that. They are taken out of the registry's packages and kept in the
//! user's cache folder; the packages themselves are not kept.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use clap::Args;

use crate::{libtorch, paths, process};

/// Type-check the `cuda` feature against header packages, and compile its kernels; needs no CUDA toolkit.
///
/// Downloads NVIDIA's packages of headers and of the compiler for kernels (about 0.3 GB) on first use and keeps what it needs of them in
/// the user's cache folder. Compiles the C++ side and checks the Rust side; links nothing and runs nothing on a GPU.
#[derive(Debug, Args)]
pub(crate) struct Arguments {}

/// The packages whose headers `c10d`'s NCCL backend includes, of the CUDA that libtorch 2.11.0 was built with.
const PACKAGES: [&str; 4] =
    ["nvidia-cuda-runtime==13.0.*", "nvidia-cuda-crt==13.0.*", "nvidia-cuda-cccl==13.0.*", "nvidia-nccl-cu13==2.28.9"];

pub(crate) fn run(_: &Arguments) -> Result<()> {
    libtorch::ensure()?;
    let headers = header_folders()?;
    for package in ["torch-ext", "accelerate-rs"] {
        let mut check = process::cargo(&["clippy", "--package", package, "--features", "cuda", "--", "-D", "warnings"]);
        process::run(check.env("ACCELERATE_CUDA_INCLUDE", &headers))?;
    }
    compile_kernels()?;
    println!("check-cuda: the `cuda` feature compiles");
    Ok(())
}

/// The compiler that a program finds beside libtorch, of the same CUDA.
const COMPILER: &str = "nvidia-cuda-nvrtc==13.0.*";

/// Compute capabilities, without their dots: GPUs from 2018 on, of which the last two multiply FP8 numbers.
const ARCHITECTURES: [&str; 4] = ["75", "80", "89", "90"];

/// Compiles the kernels as a program does on its GPU, where otherwise nobody would notice an error before.
fn compile_kernels() -> Result<()> {
    // NVRTC is a C library; Python calls it without anything to build.
    const COMPILE: &str = "import ctypes, pathlib, sys\n\
         folder, architectures, *files = sys.argv[1:]\n\
         nvrtc = ctypes.CDLL(next(map(str, pathlib.Path(folder).rglob('libnvrtc.so.*'))))\n\
         for architecture in architectures.split(','):\n\
         \x20   program, size = ctypes.c_void_p(), ctypes.c_size_t()\n\
         \x20   code = b''.join(pathlib.Path(file).read_bytes() for file in files)\n\
         \x20   nvrtc.nvrtcCreateProgram(ctypes.byref(program), code, b'kernels.cu', 0, None, None)\n\
         \x20   options = [b'--gpu-architecture=sm_' + architecture.encode(), b'--fmad=false', b'--std=c++17']\n\
         \x20   status = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))\n\
         \x20   nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))\n\
         \x20   log = ctypes.create_string_buffer(size.value)\n\
         \x20   nvrtc.nvrtcGetProgramLog(program, log)\n\
         \x20   if status != 0:\n\
         \x20       sys.exit(f'sm_{architecture}: ' + log.value.decode())\n";
    let folder = ensure_compiler()?;
    let crate_folder = paths::repository_root().join("crates/torch-ext");
    let list = crate_folder.join("src/cuda_kernels/enabled.rs");
    let list = fs::read_to_string(&list).with_context(|| format!("could not read {}", list.display()))?;
    let kernels = kernel_files(&list);
    anyhow::ensure!(!kernels.is_empty(), "src/cuda_kernels/enabled.rs of torch-ext includes no file of shim/cuda");
    let mut compile = Command::new(libtorch::python()?);
    compile.args(["-c", COMPILE]).arg(&folder).arg(ARCHITECTURES.join(","));
    compile.args(kernels.iter().map(|name| crate_folder.join(name)));
    // The compiler looks for its second half by name.
    compile.env("LD_LIBRARY_PATH", folder.join("nvidia/cu13/lib"));
    process::read(&mut compile)?;
    println!("kernels compile for sm_{}", ARCHITECTURES.join(", sm_"));
    Ok(())
}

/// The files that are the kernels' program, in order, from the source that includes them: paths below `torch-ext`.
fn kernel_files(source: &str) -> Vec<&str> {
    let included = source.split("include_str!(\"../../").skip(1);
    included.filter_map(|rest| rest.split('"').next()).collect()
}

/// The folder with the compiler, filled if it is not there.
fn ensure_compiler() -> Result<PathBuf> {
    let folder = paths::cache_folder()?.join("cuda-compiler-13.0");
    fill(&folder, &[COMPILER], "/lib/")?;
    Ok(folder)
}

/// What `ACCELERATE_CUDA_INCLUDE` has to be; the headers are fetched if they are not there.
pub(crate) fn header_folders() -> Result<OsString> {
    include_path(&ensure_headers()?)
}

/// The folder with the headers, filled if it is not there.
fn ensure_headers() -> Result<PathBuf> {
    let folder = paths::cache_folder()?.join("cuda-headers-13.0");
    fill(&folder, &PACKAGES, "/include/")?;
    Ok(folder)
}

/// Fills a folder of the cache with the files of these packages in whose names `part` is, if it is not there.
fn fill(folder: &Path, packages: &[&str], part: &str) -> Result<()> {
    if folder.is_dir() {
        return Ok(());
    }
    let python = libtorch::python()?;
    libtorch::require_pip(&python)?;
    let cache = paths::cache_folder()?;
    fs::create_dir_all(&cache).with_context(|| format!("could not create {}", cache.display()))?;
    let _lock = libtorch::lock(&folder.with_added_extension("lock"))?;
    // Another run may have filled it while this one waited.
    if folder.is_dir() {
        return Ok(());
    }
    let wheels = folder.with_added_extension("wheels");
    let mut download = Command::new(&python);
    download.args(["-m", "pip", "download", "--no-deps", "--dest"]).arg(&wheels).args(packages);
    process::run(&mut download)?;
    let fresh = folder.with_added_extension("new");
    let _ = fs::remove_dir_all(&fresh);
    unpack(&python, &wheels, &fresh, part)?;
    fs::rename(&fresh, folder).with_context(|| format!("could not create {}", folder.display()))?;
    fs::remove_dir_all(&wheels).with_context(|| format!("could not remove {}", wheels.display()))
}

/// A wheel is a zip archive, which Python reads without further packages.
fn unpack(python: &Path, wheels: &Path, folder: &Path, part: &str) -> Result<()> {
    const TAKE: &str = "import pathlib, sys, zipfile\n\
         for wheel in pathlib.Path(sys.argv[1]).glob('*.whl'):\n\
         \x20   with zipfile.ZipFile(wheel) as archive:\n\
         \x20       names = [name for name in archive.namelist() if sys.argv[3] in name]\n\
         \x20       archive.extractall(sys.argv[2], names)\n";
    process::read(Command::new(python).args(["-c", TAKE]).arg(wheels).arg(folder).arg(part)).map(drop)
}

/// Every folder named `include` below `folder`, and CUDA's own library of C++ headers within.
fn include_path(folder: &Path) -> Result<OsString> {
    let mut folders = Vec::new();
    for place in ["nvidia/cu13/include", "nvidia/cu13/include/cccl", "nvidia/nccl/include"] {
        let include = folder.join(place);
        anyhow::ensure!(
            include.is_dir(),
            "the header packages have no folder `{place}`; delete `{}` and run this again",
            folder.display()
        );
        folders.push(include);
    }
    Ok(std::env::join_paths(folders)?)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_files_of_kernels_are_those_that_are_included() {
        let source = "concat!(include_str!(\"../../shim/a.cu\"),\n    include_str!(\"../../shim/b.cu\"))";
        assert_eq!(kernel_files(source), ["shim/a.cu", "shim/b.cu"]);
        assert!(kernel_files("").is_empty());
    }

    #[test]
    fn all_header_folders_are_on_the_path_and_a_missing_one_is_named() {
        let folder = tempfile::tempdir().unwrap();
        for place in ["nvidia/cu13/include/cccl", "nvidia/nccl/include"] {
            fs::create_dir_all(folder.path().join(place)).unwrap();
        }
        assert_eq!(std::env::split_paths(&include_path(folder.path()).unwrap()).count(), 3);
        fs::remove_dir_all(folder.path().join("nvidia/nccl")).unwrap();
        let message = include_path(folder.path()).unwrap_err().to_string();
        assert!(message.contains("nvidia/nccl/include") && message.contains("delete"), "{message}");
    }
}
