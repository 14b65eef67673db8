//! Tells programs and tests where libtorch is.

fn main() {
    if let Ok(folder) = std::env::var("DEP_ACCELERATE_LIBDIR") {
        println!("cargo::rustc-link-arg=-Wl,-rpath,{folder}");
    }
}
