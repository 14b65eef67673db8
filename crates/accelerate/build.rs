//! Lets this package's tests and examples find libtorch at run time, and tells packages that use it where it is.

fn main() {
    // Where there is a package of AOTInductor, tests look at it; where there is none, they are not there.
    println!("cargo::rustc-check-cfg=cfg(aoti_package)");
    println!("cargo::rerun-if-env-changed=ACCELERATE_TEST_AOTI_PACKAGE");
    if std::env::var_os("ACCELERATE_TEST_AOTI_PACKAGE").is_some() {
        println!("cargo::rustc-cfg=aoti_package");
    }
    if let Ok(dir) = std::env::var("DEP_TORCH_EXT_LIBDIR") {
        println!("cargo::rustc-link-arg=-Wl,-rpath,{dir}");
        println!("cargo::metadata=libdir={dir}");
    }
}
