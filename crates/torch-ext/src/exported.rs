//! A function that is found by its name in a library: what a notebook's kernel calls in the library of a cell.

/// Exports a function under `$name` that runs `$body`, and gives its address. A program that loads the library finds it as
/// `void *name(void *)`, which returns what it is given. Programs that forbid unsafe code may use it. The name has to be the only one of its kind in a program or library.
///
/// ```
/// let address = torch_ext::exported_function!(say_hello, || println!("hello"));
/// assert_ne!(address, 0);
/// ```
#[macro_export]
macro_rules! exported_function {
    ($name:ident, $body:expr) => {{
        #[unsafe(no_mangle)]
        extern "C" fn $name(given: *mut ::std::ffi::c_void) -> *mut ::std::ffi::c_void {
            // No panic may leave a function that C calls.
            let _ = ::std::panic::catch_unwind(|| ($body)());
            given
        }
        $name as *const () as usize
    }};
}
