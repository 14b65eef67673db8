//! Lets the targets that need libtorch find it at run time.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if let Ok(dir) = std::env::var("DEP_TORCH_EXT_LIBDIR") {
        println!("cargo::rustc-link-arg=-Wl,-rpath,{dir}");
    }
}
