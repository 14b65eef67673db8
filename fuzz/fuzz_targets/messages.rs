#![no_main]
//! Messages of the store through which ranks find each other: requests as the server reads them, answers as clients do.
//!
//! The functions that read them are private to their crate, so its files are compiled here as they are.

use libfuzzer_sys::fuzz_target;
use wire::{Answer, Request};

#[allow(dead_code, unreachable_pub)]
#[path = "../../crates/rendezvous/src/error.rs"]
mod error;
#[allow(dead_code, unreachable_pub)]
#[path = "../../crates/rendezvous/src/wire.rs"]
mod wire;

fuzz_target!(|input: &[u8]| {
    // As it comes, and with the length in front that it should have, which is hard to guess.
    let mut framed = Vec::new();
    wire::send(&mut framed, input).expect("memory can be written to");
    assert_eq!(wire::receive(&framed[..]).expect("it is short"), input);
    for message in [Some(input.to_vec()), wire::receive(input).ok()].into_iter().flatten() {
        if let Some(request) = Request::decode(&message) {
            assert_eq!(request.encode(), message);
        }
        if let Some(answer) = Answer::decode(&message) {
            assert_eq!(answer.encode(), message);
        }
    }
});
