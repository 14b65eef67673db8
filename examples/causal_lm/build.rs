//! Lets this package's tests and examples find libtorch at run time.

fn main() {
    if let Ok(dir) = std::env::var("DEP_TORCH_EXT_LIBDIR") {
        println!("cargo::rustc-link-arg=-Wl,-rpath,{dir}");
    }
}
