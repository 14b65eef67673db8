//! Compiles the C++ shim against the libtorch that torch-sys found, and passes its folder on.

use std::env;
use std::path::{Path, PathBuf};

/// What every build has of `shim`.
const SOURCES: [&str; 18] = [
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

fn main() {
    let lib = PathBuf::from(env::var("DEP_TCH_LIBTORCH_LIB").unwrap_or_else(|_| {
        panic!("torch-sys did not say where libtorch is; set LIBTORCH to the folder of libtorch 2.11.0")
    }));
    let lib = if env::var_os("CARGO_FEATURE_CUDA").is_some() { folder_with_cuda(&lib) } else { lib };
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
    for name in SOURCES {
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

/// Adds NCCL, and links libtorch's CUDA half.
fn add_cuda(build: &mut cc::Build, lib: &Path) {
    build.includes(cuda_includes(lib)).include("shim/cuda_stubs").define("USE_CUDA", None);
    for name in ["process_group_nccl", "cuda_graph", "cuda_kernels", "quantization_cuda", "fp8_cuda"] {
        build.file(format!("shim/{name}.cpp"));
    }
    println!("cargo::rustc-link-search=native={}", lib.display());
    println!("cargo::rustc-link-lib=torch_cuda");
    println!("cargo::rustc-link-lib=c10_cuda");
}

/// The folder with `libtorch_cuda.so`: this one, or that which its links lead to, since `accelerate setup` links the CPU libraries alone.
fn folder_with_cuda(lib: &Path) -> PathBuf {
    let real = std::fs::canonicalize(lib.join("libtorch_cpu.so")).unwrap_or_else(|_| lib.join("libtorch_cpu.so"));
    let folders = [lib, real.parent().unwrap_or(lib)];
    let Some(folder) = folders.iter().find(|folder| folder.join("libtorch_cuda.so").is_file()) else {
        panic!(
            "the feature `cuda` needs libtorch with CUDA, and {} has no libtorch_cuda.so. Install it, for example by \
             `pip install torch==2.11.0`, and run `accelerate setup`, or set LIBTORCH to its folder",
            folders[1].display()
        )
    };
    folder.to_path_buf()
}

/// A header that the shim includes.
struct Header {
    name: &'static str,
    /// The package of pip that has it.
    package: &'static str,
    /// Macros that it defines, and how their values begin. Options of NCCL lie in memory as its header says, and libtorch reads them so.
    version: &'static [(&'static str, &'static str)],
}

const HEADERS: [Header; 4] = [
    Header { name: "cuda_runtime_api.h", package: "nvidia-cuda-runtime==13.0.*", version: &[("CUDART_VERSION", "13")] },
    Header { name: "crt/host_defines.h", package: "nvidia-cuda-crt==13.0.*", version: &[] },
    Header { name: "nv/target", package: "nvidia-cuda-cccl==13.0.*", version: &[] },
    Header {
        name: "nccl.h",
        package: "nvidia-nccl-cu13==2.28.9",
        version: &[("NCCL_MAJOR", "2"), ("NCCL_MINOR", "28")],
    },
];

impl Header {
    /// What it is in a folder, if it is there and of another version.
    fn other_version(&self, folder: &Path) -> Option<String> {
        let text = std::fs::read_to_string(folder.join(self.name)).ok()?;
        self.version.iter().find_map(|(macro_name, wanted)| {
            let defined = |line: &str| line.strip_prefix("#define")?.trim().strip_prefix(macro_name).map(str::to_owned);
            let found = text.lines().find_map(defined).unwrap_or_default();
            let found = found.trim();
            let name = self.name;
            (!found.starts_with(wanted)).then(|| format!("{macro_name} of its {name} is {found:?}, wanted {wanted}"))
        })
    }

    /// Whether a folder can be what the compiler takes it from, and what is wrong with it if not. The compiler takes other headers from it, too:
    /// none in it may be of another version.
    fn look(&self, folder: &Path) -> Result<(), String> {
        if let Err(error) = std::fs::read(folder.join(self.name)) {
            return Err(if folder.is_dir() { error.kind().to_string() } else { "no such folder".to_owned() });
        }
        let toolkit = folder.parent().filter(|_| folder.ends_with("cccl")).unwrap_or(folder);
        match HEADERS.iter().find_map(|header| header.other_version(toolkit)) {
            Some(found) => Err(found),
            None => Ok(()),
        }
    }
}

/// Folders with the headers of CUDA and NCCL: those in `ACCELERATE_CUDA_INCLUDE`, of the packages that pip installs with torch, of the
/// toolkit that variables name, and where Linux has them.
fn cuda_includes(lib: &Path) -> Vec<PathBuf> {
    let variables = ["ACCELERATE_CUDA_INCLUDE", "CUDA_HOME", "CUDA_PATH"];
    variables.iter().for_each(|name| println!("cargo::rerun-if-env-changed={name}"));
    let variable = |name: &&str| env::var_os(name).filter(|value| !value.is_empty());
    let named = variable(&variables[0]).map_or(Vec::new(), |folders| env::split_paths(&folders).collect());
    // The wheel's libraries are in `torch/lib`, beside which pip puts `nvidia`.
    let packages = lib.join("../../nvidia");
    let wheels = ["cu13", "nccl"].map(|name| packages.join(name).join("include"));
    let toolkits = variables[1..].iter().filter_map(variable).map(PathBuf::from).map(|home| home.join("include"));
    // The compiler looks into these by itself, and in their order.
    let of_compiler = [
        PathBuf::from("/usr/include"),
        PathBuf::from(format!("/usr/include/{}-linux-gnu", env::var("CARGO_CFG_TARGET_ARCH").unwrap_or_default())),
    ];
    let usual =
        ["/usr/local/cuda/include", "/usr/include/cuda"].map(PathBuf::from).into_iter().chain(of_compiler.clone());
    let all = named.into_iter().chain(wheels).chain(toolkits).chain(usual);
    // CUDA's own library of C++ headers has a folder within.
    let all: Vec<PathBuf> = all.flat_map(|folder| [folder.join("cccl"), folder]).collect();
    let mut folders: Vec<PathBuf> = Vec::new();
    let mut missing: Vec<&Header> = Vec::new();
    for header in &HEADERS {
        match all.iter().find(|folder| header.look(folder).is_ok()) {
            Some(folder) if of_compiler.contains(folder) || folders.contains(folder) => {}
            Some(folder) => folders.push(folder.clone()),
            None => missing.push(header),
        }
    }
    if !missing.is_empty() {
        panic!("{}", words_of_missing(&missing, &all));
    }
    folders
}

/// What to install for headers that are in none of the folders.
fn words_of_missing(missing: &[&Header], folders: &[PathBuf]) -> String {
    let names: Vec<&str> = missing.iter().map(|header| header.name).collect();
    let packages: Vec<String> = missing.iter().map(|header| format!("'{}'", header.package)).collect();
    let said = |folder: &PathBuf| {
        let found: Vec<String> = missing
            .iter()
            .map(|header| format!("{}: {}", header.name, header.look(folder).err().unwrap_or_default()))
            .collect();
        format!("\n  {} ({})", folder.display(), found.join("; "))
    };
    let looked: String = folders.iter().filter(|folder| !folder.ends_with("cccl")).map(said).collect();
    format!(
        "the feature `cuda` needs the headers {} of CUDA 13 and NCCL 2.28, as libtorch 2.11.0 was built with. Install them beside the \
         Python package torch by `pip install {}`, or with the CUDA toolkit, or name their folders in ACCELERATE_CUDA_INCLUDE, which \
         lists folders as PATH does. They were looked for in:{looked}",
        names.join(", "),
        packages.join(" ")
    )
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
