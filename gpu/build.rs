//! Lets this package's program and tests find libtorch here, and a bundle find it wherever it is taken.

fn main() {
    if std::env::var_os("CARGO_FEATURE_CUDA").is_some() {
        // Kernels register themselves when their library is loaded, and no symbol says that they are needed. What that library
        // needs itself is only there where the bundle runs.
        println!("cargo::rustc-link-arg=-Wl,--no-as-needed,-ltorch_cuda,-lc10_cuda,--as-needed");
        println!("cargo::rustc-link-arg=-Wl,--allow-shlib-undefined");
    } else if let Ok(dir) = std::env::var("DEP_TORCH_EXT_LIBDIR") {
        println!("cargo::rustc-link-arg=-Wl,-rpath,{dir}");
    }
}
