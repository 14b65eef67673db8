//! Compiles the C++ shim against the libtorch that torch-sys found, and passes its folder on.

use std::env;
use std::path::{Path, PathBuf};

fn main() {
    let lib = PathBuf::from(env::var("DEP_TCH_LIBTORCH_LIB").unwrap_or_else(|_| {
        panic!("torch-sys did not say where libtorch is; set LIBTORCH to the folder of libtorch 2.11.0")
    }));
    let include = include_dir(&lib);
    println!("cargo::metadata=libdir={}", lib.display());
    println!("cargo::rustc-link-arg=-Wl,-rpath,{}", lib.display());
    link_for_doc_tests(&lib);

    let mut build = cc::Build::new();
    build
        .cpp(true)
        .std("c++20")
        .pic(true)
        .warnings(false)
        // The shim only forwards; line tables of libtorch's headers would triple its build time.
        .debug(false)
        .opt_level(1)
        .include("shim")
        .include("shim/include")
        .include(&include)
        .include(include.join("torch/csrc/api/include"))
        .define("USE_DISTRIBUTED", None)
        .define("USE_C10D_GLOO", None)
        // Gloo's classes are declared in our stubs; nothing of them may be exported from here.
        .flag("-fvisibility=hidden");
    if let Ok(abi) = env::var("LIBTORCH_CXX11_ABI") {
        build.define("_GLIBCXX_USE_CXX11_ABI", abi.as_str());
    }
    if env::var_os("CARGO_FEATURE_CUDA").is_some() {
        add_cuda(&mut build, &lib);
    }
    let sources = [
        "error",
        "store",
        "store_backend",
        "process_group",
        "reducer",
        "autograd",
        "saved_tensors",
        "device",
        "ops",
        "scalar",
        "tensor_vec",
        "file",
        "profiler",
        "script_module",
        "aot_inductor",
        "stream",
        "quantization",
        "attention",
    ];
    for name in sources {
        build.file(format!("shim/{name}.cpp"));
    }
    build.compile("torch_ext_shim");
    compile_kernels(&include);
    println!("cargo::rerun-if-changed=shim");
    println!("cargo::rustc-link-lib=stdc++");
}

/// The loops that compute something themselves: optimised, and with a product and a sum rounded together only where
/// they say so.
fn compile_kernels(include: &Path) {
    let mut build = cc::Build::new();
    build.cpp(true).std("c++20").pic(true).warnings(false).debug(false).opt_level(3).include("shim").include(include);
    build.flag("-ffp-contract=off").flag("-fvisibility=hidden");
    if let Ok(abi) = env::var("LIBTORCH_CXX11_ABI") {
        build.define("_GLIBCXX_USE_CXX11_ABI", abi.as_str());
    }
    for name in ["adam_kernel", "norm_kernel", "quant_kernel", "quant_product", "int8_product", "few_rows_kernel"] {
        build.file(format!("shim/{name}.cpp"));
    }
    build.compile("torch_ext_kernels");
}

/// Adds NCCL. Its headers and CUDA's come from the folders in `ACCELERATE_CUDA_INCLUDE` (`cargo xtask check-cuda`
/// fetches them); libtorch's CUDA half is linked from the folder that libtorch_cpu really is in.
fn add_cuda(build: &mut cc::Build, lib: &Path) {
    println!("cargo::rerun-if-env-changed=ACCELERATE_CUDA_INCLUDE");
    let folders = env::var_os("ACCELERATE_CUDA_INCLUDE").unwrap_or_default();
    build.includes(env::split_paths(&folders)).include("shim/cuda_stubs").define("USE_CUDA", None);
    for name in ["process_group_nccl", "cuda_graph", "cuda_kernels", "quantization_cuda", "fp8_cuda"] {
        build.file(format!("shim/{name}.cpp"));
    }
    let real = std::fs::canonicalize(lib.join("libtorch_cpu.so")).unwrap_or_else(|_| lib.join("libtorch_cpu.so"));
    if let Some(folder) = real.parent() {
        println!("cargo::rustc-link-search=native={}", folder.display());
    }
    println!("cargo::rustc-link-lib=torch_cuda");
    println!("cargo::rustc-link-lib=c10_cuda");
}

/// The wheel and the plain archive both keep `include` beside `lib`.
fn include_dir(lib: &Path) -> PathBuf {
    println!("cargo::rerun-if-env-changed=LIBTORCH_INCLUDE");
    match env::var("LIBTORCH_INCLUDE") {
        Ok(folder) => Path::new(&folder).join("include"),
        Err(_) => lib.with_file_name("include"),
    }
}

/// Cargo puts link paths inside the target folder on the library path of tests it runs. Doc tests
/// get no linker arguments, so this is what lets them find libtorch.
fn link_for_doc_tests(lib: &Path) {
    let Ok(out) = env::var("OUT_DIR") else { return };
    let link = Path::new(&out).join("libtorch");
    let _ = std::fs::remove_file(&link);
    #[cfg(unix)]
    let _ = std::os::unix::fs::symlink(lib, &link);
    println!("cargo::rustc-link-search=native={}", link.display());
}
