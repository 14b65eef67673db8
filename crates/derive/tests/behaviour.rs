//! The derived code at work, on a stand-in for the trait and its tensors.
#![allow(clippy::unwrap_used, missing_docs)]

// The derived code says `::accelerate`; here that is this test.
extern crate self as accelerate;

use accelerate_derive::TensorTree;
use std::collections::HashMap;
use tch::Tensor;

pub mod tch {
    #[derive(Clone, Debug, PartialEq)]
    pub struct Tensor(pub i64);
}

pub type Result<T> = std::result::Result<T, String>;

pub trait TensorTree: Sized {
    fn try_map_tensors(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self>;
    fn for_each_tensor(&self, f: &mut dyn FnMut(&Tensor));
    fn pack(&self, parcel: &mut Parcel) -> Result<()> {
        let _ = parcel;
        Err("cannot be sent".to_owned())
    }
    fn unpack(parcel: &mut Parcel) -> Result<Self> {
        let _ = parcel;
        Err("cannot be sent".to_owned())
    }
}

/// Numbers in a row.
#[derive(Debug, Default)]
pub struct Parcel(std::collections::VecDeque<i64>);

impl Parcel {
    pub fn put(&mut self, number: &u32) -> Result<()> {
        self.0.push_back(i64::from(*number));
        Ok(())
    }
    pub fn take<T: TryFrom<i64>>(&mut self) -> Result<T> {
        self.0.pop_front().and_then(|number| number.try_into().ok()).ok_or("nothing there".to_owned())
    }
    pub fn unknown_variant(&self, number: u32) -> String {
        format!("no variant {number}")
    }
}

impl TensorTree for Tensor {
    fn try_map_tensors(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
        f(self)
    }

    fn for_each_tensor(&self, f: &mut dyn FnMut(&Tensor)) {
        f(self);
    }

    fn pack(&self, parcel: &mut Parcel) -> Result<()> {
        parcel.0.push_back(self.0);
        Ok(())
    }

    fn unpack(parcel: &mut Parcel) -> Result<Self> {
        parcel.take().map(Tensor)
    }
}

impl<T: TensorTree> TensorTree for Option<Box<T>> {
    fn try_map_tensors(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
        self.as_ref().map(|tree| tree.try_map_tensors(f).map(Box::new)).transpose()
    }

    fn for_each_tensor(&self, f: &mut dyn FnMut(&Tensor)) {
        self.iter().for_each(|tree| tree.for_each_tensor(f));
    }
}

#[test]
fn variants_travel_with_their_number_and_skipping_types_do_not_travel() {
    #[derive(Debug, PartialEq, TensorTree)]
    enum Sent {
        None,
        Two { f: Tensor, parcel: Tensor },
    }

    let mut parcel = Parcel::default();
    Sent::Two { f: Tensor(5), parcel: Tensor(6) }.pack(&mut parcel).unwrap();
    Sent::None.pack(&mut parcel).unwrap();
    assert_eq!(parcel.0, [1, 5, 6, 0]);
    assert_eq!(Sent::unpack(&mut parcel), Ok(Sent::Two { f: Tensor(5), parcel: Tensor(6) }));
    assert_eq!(Sent::unpack(&mut parcel), Ok(Sent::None));
    parcel.put(&2).unwrap();
    assert_eq!(Sent::unpack(&mut parcel), Err("no variant 2".to_owned()));
    let skipping = Named { f: Tensor(1), tensor: Tensor(2), notes: HashMap::new() };
    assert_eq!(skipping.pack(&mut parcel), Err("cannot be sent".to_owned()));
}

/// Adds 10 to each tensor, and lists tensors in the order of both methods, which must agree.
fn ten_more<T: TensorTree>(tree: &T) -> (T, Vec<i64>) {
    let mut mapped = Vec::new();
    let more = tree
        .try_map_tensors(&mut |tensor| {
            mapped.push(tensor.0);
            Ok(Tensor(tensor.0 + 10))
        })
        .unwrap();
    let mut visited = Vec::new();
    tree.for_each_tensor(&mut |tensor| visited.push(tensor.0));
    assert_eq!(mapped, visited);
    (more, visited)
}

#[derive(Clone, Debug, PartialEq, TensorTree)]
struct Named {
    // Names that the derived code might use for itself.
    f: Tensor,
    tensor: Tensor,
    #[tensor_tree(skip)]
    notes: HashMap<String, usize>,
}

#[derive(Debug, PartialEq, TensorTree)]
struct Tuple(Tensor, #[tensor_tree(skip)] &'static str, Named);

#[derive(Debug, PartialEq, TensorTree)]
struct Unit;

#[derive(Debug, PartialEq, TensorTree)]
enum Output<L> {
    Loss { loss: L, logits: Tensor },
    Logits(Tensor),
    Nothing,
}

#[derive(Debug, PartialEq, TensorTree)]
struct List<T> {
    head: T,
    tail: Option<Box<List<T>>>,
}

#[derive(TensorTree)]
enum Never {}

fn named() -> Named {
    Named { f: Tensor(1), tensor: Tensor(2), notes: HashMap::from([("a".to_owned(), 1)]) }
}

#[test]
fn structs_are_mapped_field_by_field() {
    let (more, visited) = ten_more(&Tuple(Tensor(0), "kept", named()));
    assert_eq!(visited, [0, 1, 2]);
    let wanted = Named { f: Tensor(11), tensor: Tensor(12), ..named() };
    assert_eq!(more, Tuple(Tensor(10), "kept", wanted));
    assert_eq!(ten_more(&Unit), (Unit, vec![]));
}

#[test]
fn enums_keep_their_variant() {
    let loss = Output::Loss { loss: Tensor(1), logits: Tensor(2) };
    assert_eq!(ten_more(&loss).0, Output::Loss { loss: Tensor(11), logits: Tensor(12) });
    assert_eq!(ten_more(&Output::<Tensor>::Logits(Tensor(3))).0, Output::Logits(Tensor(13)));
    assert_eq!(ten_more(&Output::<Tensor>::Nothing), (Output::Nothing, vec![]));
}

#[test]
fn a_generic_type_may_contain_itself() {
    let tail = Some(Box::new(List { head: Tensor(2), tail: None }));
    let (more, visited) = ten_more(&List { head: Tensor(1), tail });
    assert_eq!(visited, [1, 2]);
    assert_eq!(more.tail.unwrap().head, Tensor(12));
}

#[test]
fn the_first_error_ends_the_mapping() {
    let mut calls = 0;
    let error = named().try_map_tensors(&mut |_| {
        calls += 1;
        Err("stop".to_owned())
    });
    assert_eq!((error, calls), (Err("stop".to_owned()), 1));
}

#[test]
fn an_enum_without_variants_is_a_tree() {
    fn is_tree<T: TensorTree>() {}
    is_tree::<Never>();
}
