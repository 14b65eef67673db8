//! Python's pickles, read as plain data.
//!
//! The machine has the instructions that `torch.save` and `torch.distributed.checkpoint` use, of protocols 2 to 5. None of
//! them has an effect beyond its own stack: "call" notes what would have been called. Each instruction adds a bounded
//! amount of memory to what its own bytes take, and takes time in proportion to what it adds or removes, so that a pickle
//! of any content takes memory and time in proportion to its length. Values that hold each other are never walked here,
//! so that no depth is too large.
//!
//! Long because it is one machine: all instructions work on one stack.

use super::globals::{Global, Use};
use crate::Result;
use crate::error::pytorch::{PickleProblem as Problem, PytorchErrorKind as Kind};
use crate::weight_files::shown;
use std::collections::HashMap;

/// Longest pickle that is read: the metadata of a run on thousands of ranks are shorter.
pub const MAX_PICKLE_BYTES: u64 = 256 << 20;

/// Longest text of which something is made: no name is as long. What is looked at often must be short.
const MAX_TEXT_BYTES: u64 = 4096;

/// So many lists and dictionaries may be in any pickle, and in a long one as many as are of some length. Each takes some times the
/// memory of the few bytes that it may be written in.
const FEW_LISTS: usize = 1 << 20;
const LIST_BYTES: usize = 32;

/// A pickle that has been read.
#[derive(Debug)]
pub(super) struct Pickle<'a> {
    bytes: &'a [u8],
    nodes: Vec<Node>,
    /// What tuples hold, one behind the other.
    items: Vec<Id>,
    lists: Vec<Vec<Id>>,
    dicts: Vec<Vec<(Id, Id)>>,
    root: Id,
}

/// A value, by its place among the nodes.
#[derive(Clone, Copy, Debug)]
struct Id(u32);

/// A part of the bytes, or of the items.
#[derive(Clone, Copy, Debug)]
struct Span {
    start: u32,
    length: u32,
}

#[derive(Clone, Copy, Debug)]
enum Node {
    None,
    Bool(bool),
    Int(i64),
    /// A whole number that only fits without a sign.
    LargeInt(u64),
    Float(f64),
    /// A whole number of more than 64 bits.
    OtherNumber,
    Text(Span),
    /// Bytes, or a text that is longer than any name.
    Bytes,
    Tuple(Span),
    /// Of whatever.
    Set,
    EmptyList,
    List(u32),
    EmptyDict,
    Dict(u32),
    Global(Global),
    Call(Global, Id),
    /// What a call would have made that is of no use here.
    Opaque(Global),
    Object(Global, Option<Id>),
    Persistent(Id),
}

/// A value of a pickle.
#[derive(Clone, Copy, Debug)]
pub(super) struct Value<'a> {
    pickle: &'a Pickle<'a>,
    id: Id,
}

/// What a [`Value`] is.
#[derive(Clone, Copy, Debug)]
pub(super) enum Data<'a> {
    Int(i64),
    LargeInt(u64),
    Float(f64),
    Bool(bool),
    None,
    Text(&'a str),
    Tuple(Items<'a>),
    List(Items<'a>),
    Dict(Pairs<'a>),
    Global(Global),
    /// What would have been called, and the tuple of its arguments.
    Call(Global, Items<'a>),
    /// A class, and the state of an object of it.
    Object(Global, Option<Value<'a>>),
    /// What stands for something outside of the pickle.
    Persistent(Value<'a>),
    /// Numbers, bytes and objects of which nothing is made here.
    Other(&'static str),
}

/// What a tuple or a list holds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Items<'a> {
    pickle: &'a Pickle<'a>,
    ids: &'a [Id],
}

impl<'a> Items<'a> {
    pub(super) fn len(self) -> usize {
        self.ids.len()
    }

    pub(super) fn get(self, place: usize) -> Option<Value<'a>> {
        self.ids.get(place).map(|&id| Value { pickle: self.pickle, id })
    }

    pub(super) fn iter(self) -> impl Iterator<Item = Value<'a>> {
        self.ids.iter().map(move |&id| Value { pickle: self.pickle, id })
    }
}

/// The keys and values of a dictionary, in the order in which they were set. A key may be there twice.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pairs<'a> {
    pickle: &'a Pickle<'a>,
    ids: &'a [(Id, Id)],
}

impl<'a> Pairs<'a> {
    pub(super) fn len(self) -> usize {
        self.ids.len()
    }

    pub(super) fn iter(self) -> impl Iterator<Item = (Value<'a>, Value<'a>)> {
        let value = move |id| Value { pickle: self.pickle, id };
        self.ids.iter().map(move |&(key, of_key)| (value(key), value(of_key)))
    }
}

impl<'a> Value<'a> {
    pub(super) fn data(self) -> Data<'a> {
        let Self { pickle, id } = self;
        let items = |ids| Items { pickle, ids };
        match pickle.nodes.get(id.0 as usize).copied().unwrap_or(Node::None) {
            Node::None => Data::None,
            Node::Bool(value) => Data::Bool(value),
            Node::Int(value) => Data::Int(value),
            Node::LargeInt(value) => Data::LargeInt(value),
            Node::Float(value) => Data::Float(value),
            Node::OtherNumber => Data::Other("a number of more than 64 bits"),
            Node::Opaque(global) => Data::Other(global.path()),
            Node::Bytes => Data::Other("bytes, or a long text"),
            Node::Set => Data::Other("a set"),
            Node::Text(span) => Data::Text(pickle.text(span)),
            Node::Tuple(span) => Data::Tuple(items(pickle.items_of(span))),
            Node::EmptyList => Data::List(items(&[])),
            Node::List(list) => Data::List(items(pickle.lists.get(list as usize).map_or(&[], Vec::as_slice))),
            Node::EmptyDict => Data::Dict(Pairs { pickle, ids: &[] }),
            Node::Dict(dict) => {
                Data::Dict(Pairs { pickle, ids: pickle.dicts.get(dict as usize).map_or(&[], Vec::as_slice) })
            }
            Node::Global(global) => Data::Global(global),
            Node::Call(global, arguments) => match pickle.nodes.get(arguments.0 as usize) {
                Some(&Node::Tuple(span)) => Data::Call(global, items(pickle.items_of(span))),
                _ => Data::Call(global, items(&[])),
            },
            Node::Object(global, state) => Data::Object(global, state.map(|id| Value { pickle, id })),
            Node::Persistent(id) => Data::Persistent(Value { pickle, id }),
        }
    }

    /// Whether it is this text. It takes no longer than the shorter of both.
    pub(super) fn is_text(self, wanted: &str) -> bool {
        match self.pickle.nodes.get(self.id.0 as usize) {
            Some(&Node::Text(span)) => part(self.pickle.bytes, span) == wanted.as_bytes(),
            _ => false,
        }
    }

    /// In words, for a message.
    pub(super) fn kind(self) -> String {
        match self.data() {
            Data::Int(_) | Data::LargeInt(_) | Data::Float(_) => "a number".to_owned(),
            Data::Bool(_) => "a truth value".to_owned(),
            Data::None => "None".to_owned(),
            Data::Text(_) => "a text".to_owned(),
            Data::Tuple(_) => "a tuple".to_owned(),
            Data::List(_) => "a list".to_owned(),
            Data::Dict(_) => "a dictionary".to_owned(),
            Data::Global(global) | Data::Call(global, _) | Data::Object(global, _) => global.path().to_owned(),
            Data::Persistent(_) => "a storage".to_owned(),
            Data::Other(kind) => kind.to_owned(),
        }
    }
}

impl<'a> Pickle<'a> {
    pub(super) fn read(bytes: &'a [u8]) -> Result<Self> {
        if bytes.len() as u64 > MAX_PICKLE_BYTES {
            return Err(Kind::from(Problem::Long { found_bytes: bytes.len() as u64 }).into());
        }
        Machine::new(bytes).run().map_err(|problem| Kind::from(problem).into())
    }

    pub(super) fn root(&'a self) -> Value<'a> {
        Value { pickle: self, id: self.root }
    }

    /// Its length.
    pub(super) fn num_bytes(&self) -> usize {
        self.bytes.len()
    }

    fn text(&self, span: Span) -> &'a str {
        // It was checked when it was read.
        std::str::from_utf8(part(self.bytes, span)).unwrap_or_default()
    }

    fn items_of(&self, span: Span) -> &[Id] {
        part(&self.items, span)
    }
}

fn part<T>(all: &[T], span: Span) -> &[T] {
    let start = span.start as usize;
    all.get(start..start + span.length as usize).unwrap_or_default()
}

struct Machine<'a> {
    pickle: Pickle<'a>,
    /// Where the next instruction or operand begins.
    at: usize,
    /// Where the instruction that is being carried out begins.
    instruction_at: usize,
    stack: Vec<Id>,
    /// The lengths of the stack at which marks were set.
    marks: Vec<u32>,
    memo: HashMap<u32, Id>,
}

type Step<T = ()> = std::result::Result<T, Problem>;

impl<'a> Machine<'a> {
    fn new(bytes: &'a [u8]) -> Self {
        let pickle =
            Pickle { bytes, nodes: Vec::new(), items: Vec::new(), lists: Vec::new(), dicts: Vec::new(), root: Id(0) };
        Self { pickle, at: 0, instruction_at: 0, stack: Vec::new(), marks: Vec::new(), memo: HashMap::new() }
    }

    fn run(mut self) -> Step<Pickle<'a>> {
        loop {
            self.instruction_at = self.at;
            let [code] = self.take()?;
            if code == b'.' {
                break;
            }
            self.step(code)?;
        }
        self.pickle.root = self.pop("a value at the end")?;
        let left = self.stack.len() + self.marks.len();
        if left > 0 || self.at < self.pickle.bytes.len() {
            return Err(Problem::Rest { at: self.at, left });
        }
        Ok(self.pickle)
    }

    /// Long because it is one table: the instructions, in the groups of Python's own documentation.
    fn step(&mut self, code: u8) -> Step {
        match code {
            // Protocol and frames, which say what is known without them.
            0x80 => self.take::<1>().map(drop),
            0x95 => self.take::<8>().map(drop),
            // Values that are written out.
            b'N' => self.push(Node::None),
            0x88 => self.push(Node::Bool(true)),
            0x89 => self.push(Node::Bool(false)),
            b'J' => self.take().map(i32::from_le_bytes).and_then(|value| self.push(Node::Int(value.into()))),
            b'K' => self.take().map(u8::from_le_bytes).and_then(|value| self.push(Node::Int(value.into()))),
            b'M' => self.take().map(u16::from_le_bytes).and_then(|value| self.push(Node::Int(value.into()))),
            0x8a => self.length::<1>().and_then(|length| self.long(length)),
            0x8b => self.length::<4>().and_then(|length| self.long(length)),
            b'G' => self.take().map(f64::from_be_bytes).and_then(|value| self.push(Node::Float(value))),
            0x8c => self.length::<1>().and_then(|length| self.push_text(length)),
            b'X' => self.length::<4>().and_then(|length| self.push_text(length)),
            0x8d => self.length::<8>().and_then(|length| self.push_text(length)),
            b'C' => self.length::<1>().and_then(|length| self.push_bytes(length)),
            b'B' => self.length::<4>().and_then(|length| self.push_bytes(length)),
            0x8e | 0x96 => self.length::<8>().and_then(|length| self.push_bytes(length)),
            // Values that hold others.
            b'(' => self.mark(),
            b')' => self.push_tuple(self.stack.len()),
            b't' => self.pop_mark().and_then(|start| self.push_tuple(start)),
            0x85..=0x87 => {
                let start =
                    self.stack.len().checked_sub(usize::from(code - 0x84)).filter(|&start| start >= self.floor());
                start.ok_or_else(|| self.operand("values for a tuple")).and_then(|start| self.push_tuple(start))
            }
            b']' => self.push(Node::EmptyList),
            b'a' => self.append(self.stack.len().saturating_sub(1)),
            b'e' => self.pop_mark().and_then(|start| self.append(start)),
            b'}' => self.push(Node::EmptyDict),
            // Sets, of which nothing is made.
            0x8f => self.push(Node::Set),
            0x90 => self.pop_mark().and_then(|start| self.add_to_set(start)),
            0x91 => self.pop_mark().map(|start| self.stack.truncate(start)).and_then(|()| self.push(Node::Set)),
            b's' => self.set_items(self.stack.len().saturating_sub(2)),
            b'u' => self.pop_mark().and_then(|start| self.set_items(start)),
            // Values that are there already.
            b'q' => self.take::<1>().and_then(|[number]| self.put(number.into())),
            b'r' => self.take().map(u32::from_le_bytes).and_then(|number| self.put(number)),
            0x94 => self.put(self.memo.len() as u32),
            b'h' => self.take::<1>().and_then(|[number]| self.get(number.into())),
            b'j' => self.take().map(u32::from_le_bytes).and_then(|number| self.get(number)),
            // Names, and what is done with them.
            b'c' => self.global(),
            0x93 => self.stack_global(),
            b'R' => self.call(),
            0x81 => self.new_object(),
            b'b' => self.build(),
            b'Q' => self.pop("what stands for a storage").and_then(|id| self.push(Node::Persistent(id))),
            _ => Err(Problem::Instruction { at: self.instruction_at, code }),
        }
    }

    fn take<const N: usize>(&mut self) -> Step<[u8; N]> {
        let bytes = self.pickle.bytes.get(self.at..).and_then(|rest| rest.first_chunk::<N>());
        let bytes = bytes.ok_or(Problem::Ended { at: self.instruction_at })?;
        self.at += N;
        Ok(*bytes)
    }

    /// A length of so many bytes.
    fn length<const N: usize>(&mut self) -> Step<u64> {
        let bytes = self.take::<N>()?;
        Ok(bytes.iter().rev().fold(0, |length, &byte| length << 8 | u64::from(byte)))
    }

    fn take_span(&mut self, length: u64) -> Step<Span> {
        let rest = (self.pickle.bytes.len() - self.at) as u64;
        if length > rest {
            return Err(Problem::Ended { at: self.instruction_at });
        }
        let span = Span { start: self.at as u32, length: length as u32 };
        self.at += length as usize;
        Ok(span)
    }

    fn operand(&self, wanted: &'static str) -> Problem {
        Problem::Operand { at: self.instruction_at, wanted }
    }

    /// Where the last mark is, below which no instruction reaches.
    fn floor(&self) -> usize {
        self.marks.last().map_or(0, |&mark| mark as usize)
    }

    fn add(&mut self, node: Node) -> Id {
        let id = Id(self.pickle.nodes.len() as u32);
        self.pickle.nodes.push(node);
        id
    }

    fn push(&mut self, node: Node) -> Step {
        let id = self.add(node);
        self.stack.push(id);
        Ok(())
    }

    fn pop(&mut self, wanted: &'static str) -> Step<Id> {
        if self.stack.len() <= self.floor() {
            return Err(self.operand(wanted));
        }
        self.stack.pop().ok_or_else(|| self.operand(wanted))
    }

    fn node(&self, id: Id) -> Node {
        self.pickle.nodes.get(id.0 as usize).copied().unwrap_or(Node::None)
    }

    fn mark(&mut self) -> Step {
        self.marks.push(self.stack.len() as u32);
        Ok(())
    }

    fn pop_mark(&mut self) -> Step<usize> {
        self.marks.pop().map(|mark| mark as usize).ok_or_else(|| self.operand("a mark"))
    }

    fn long(&mut self, length: u64) -> Step {
        let span = self.take_span(length)?;
        let bytes = part(self.pickle.bytes, span);
        // One more byte than a number without a sign has is for the sign.
        if let Some((0, unsigned)) = bytes.split_last()
            && let Ok(unsigned) = unsigned.try_into()
        {
            let value = u64::from_le_bytes(unsigned);
            return self.push(i64::try_from(value).map_or(Node::LargeInt(value), Node::Int));
        }
        if bytes.len() > size_of::<i64>() {
            return self.push(Node::OtherNumber);
        }
        // Two's complement: the sign goes on to the left.
        let is_negative = bytes.last().is_some_and(|&byte| byte >= 0x80);
        let mut value = [if is_negative { 0xff } else { 0 }; size_of::<i64>()];
        value[..bytes.len()].copy_from_slice(bytes);
        self.push(Node::Int(i64::from_le_bytes(value)))
    }

    fn push_text(&mut self, length: u64) -> Step {
        let span = self.take_span(length)?;
        if length > MAX_TEXT_BYTES {
            return self.push(Node::Bytes);
        }
        if std::str::from_utf8(part(self.pickle.bytes, span)).is_err() {
            return Err(self.operand("a text in UTF-8"));
        }
        self.push(Node::Text(span))
    }

    fn push_bytes(&mut self, length: u64) -> Step {
        self.take_span(length)?;
        self.push(Node::Bytes)
    }

    /// Makes a tuple of all from this place of the stack on.
    fn push_tuple(&mut self, start: usize) -> Step {
        let span = Span { start: self.pickle.items.len() as u32, length: (self.stack.len() - start) as u32 };
        self.pickle.items.extend(self.stack.drain(start..));
        self.push(Node::Tuple(span))
    }

    /// Appends all from this place of the stack on to the list below.
    fn append(&mut self, start: usize) -> Step {
        let wanted = "a list";
        let below = start.checked_sub(1).filter(|&below| below >= self.floor());
        let list = below.and_then(|below| self.stack.get(below).copied()).ok_or_else(|| self.operand(wanted))?;
        let Self { pickle, stack, .. } = self;
        let number = match pickle.nodes.get(list.0 as usize) {
            Some(&Node::List(number)) => number,
            Some(Node::EmptyList) => {
                check_number(pickle, self.instruction_at)?;
                pickle.lists.push(Vec::new());
                pickle.lists.len() as u32 - 1
            }
            _ => return Err(self.operand(wanted)),
        };
        if let Some(items) = pickle.lists.get_mut(number as usize) {
            items.extend(stack.drain(start..));
            pickle.nodes[list.0 as usize] = Node::List(number);
        }
        Ok(())
    }

    /// Sets all from this place of the stack on, keys and values, in the dictionary below.
    fn set_items(&mut self, start: usize) -> Step {
        let wanted = "a dictionary, and a value for each key";
        let below = start.checked_sub(1).filter(|&below| below >= self.floor());
        let dict = below.and_then(|below| self.stack.get(below).copied()).ok_or_else(|| self.operand(wanted))?;
        if !(self.stack.len() - start).is_multiple_of(2) {
            return Err(self.operand(wanted));
        }
        let Self { pickle, stack, .. } = self;
        let number = match pickle.nodes.get(dict.0 as usize) {
            Some(&Node::Dict(number)) => number,
            Some(Node::EmptyDict) => {
                check_number(pickle, self.instruction_at)?;
                pickle.dicts.push(Vec::new());
                pickle.dicts.len() as u32 - 1
            }
            _ => return Err(self.operand(wanted)),
        };
        if let Some(pairs) = pickle.dicts.get_mut(number as usize) {
            pairs.extend(stack[start..].chunks_exact(2).map(|pair| (pair[0], pair[1])));
            stack.truncate(start);
            pickle.nodes[dict.0 as usize] = Node::Dict(number);
        }
        Ok(())
    }

    /// Drops all from this place of the stack on, above a set.
    fn add_to_set(&mut self, start: usize) -> Step {
        let below = start.checked_sub(1).filter(|&below| below >= self.floor());
        let set = below.and_then(|below| self.stack.get(below).copied());
        match set.map(|set| self.node(set)) {
            Some(Node::Set) => self.stack.truncate(start),
            _ => return Err(self.operand("a set")),
        }
        Ok(())
    }

    fn put(&mut self, number: u32) -> Step {
        let top = self.stack.last().copied().filter(|_| self.stack.len() > self.floor());
        let top = top.ok_or_else(|| self.operand("a value to remember"))?;
        self.memo.insert(number, top);
        Ok(())
    }

    fn get(&mut self, number: u32) -> Step {
        let id = self.memo.get(&number).copied().ok_or_else(|| self.operand("a value that was remembered"))?;
        self.stack.push(id);
        Ok(())
    }

    /// A name of two lines.
    fn global(&mut self) -> Step {
        let mut line = || {
            let rest = self.pickle.bytes.get(self.at..).unwrap_or_default();
            let length = line_length(rest).ok_or(Problem::Ended { at: self.instruction_at })?;
            let span = Span { start: self.at as u32, length: length as u32 };
            self.at += length + 1;
            Ok::<_, Problem>(span)
        };
        let (module, name) = (line()?, line()?);
        self.push_global(module, name)
    }

    /// A name of two texts on the stack.
    fn stack_global(&mut self) -> Step {
        let wanted = "the names of a module and of what is in it";
        let (name, module) = (self.pop(wanted)?, self.pop(wanted)?);
        match (self.node(module), self.node(name)) {
            (Node::Text(module), Node::Text(name)) => self.push_global(module, name),
            _ => Err(self.operand(wanted)),
        }
    }

    fn push_global(&mut self, module: Span, name: Span) -> Step {
        let [module, name] = [module, name].map(|span| String::from_utf8_lossy(part(self.pickle.bytes, span)));
        match Global::find(&module, &name) {
            Some(global) => self.push(Node::Global(global)),
            None => {
                let name = format!("{}.{}", shown(&module), shown(&name));
                Err(Problem::Global { at: self.instruction_at, name })
            }
        }
    }

    fn call(&mut self) -> Step {
        let wanted = "a function and its arguments";
        let (arguments, function) = (self.pop(wanted)?, self.pop(wanted)?);
        let (Node::Global(global), Node::Tuple(given)) = (self.node(function), self.node(arguments)) else {
            return Err(self.operand(wanted));
        };
        match global.allowed_use() {
            Use::Call => self.push(Node::Call(global, arguments)),
            Use::Opaque => self.push(Node::Opaque(global)),
            Use::Dictionary if given.length == 0 => self.push(Node::EmptyDict),
            Use::Member => match self.enumeration_of(given) {
                Some(enumeration) => self.push(Node::Call(enumeration, arguments)),
                None => Err(Problem::Use { at: self.instruction_at, name: global.path() }),
            },
            _ => Err(Problem::Use { at: self.instruction_at, name: global.path() }),
        }
    }

    /// The enumeration of which a member is asked for by these arguments, and nothing else.
    fn enumeration_of(&self, given: Span) -> Option<Global> {
        let &[class, name] = self.pickle.items_of(given) else { return None };
        let (Node::Global(class), Node::Text(_)) = (self.node(class), self.node(name)) else { return None };
        class.is_enumeration().then_some(class)
    }

    fn new_object(&mut self) -> Step {
        let wanted = "a class and no arguments";
        let (arguments, class) = (self.pop(wanted)?, self.pop(wanted)?);
        match (self.node(class), self.node(arguments)) {
            (Node::Global(global), Node::Tuple(Span { length: 0, .. })) if global.allowed_use() == Use::Object => {
                self.push(Node::Object(global, None))
            }
            (Node::Global(global), _) => Err(Problem::Use { at: self.instruction_at, name: global.path() }),
            _ => Err(self.operand(wanted)),
        }
    }

    fn build(&mut self) -> Step {
        let wanted = "an object without a state, and its state";
        let (state, object) = (self.pop(wanted)?, self.pop(wanted)?);
        match self.node(object) {
            Node::Object(global, None) => self.pickle.nodes[object.0 as usize] = Node::Object(global, Some(state)),
            // State dicts have a note of the versions of modules, as an attribute. What is of no use has no use for a state.
            Node::EmptyDict | Node::Dict(_) | Node::Opaque(_) => (),
            _ => return Err(self.operand(wanted)),
        }
        self.stack.push(object);
        Ok(())
    }
}

/// Whether there may be one more list or dictionary.
fn check_number(pickle: &Pickle<'_>, at: usize) -> Step {
    let most = FEW_LISTS.max(pickle.bytes.len() / LIST_BYTES);
    if pickle.lists.len() + pickle.dicts.len() < most { Ok(()) } else { Err(Problem::Many { at, most }) }
}

/// Where a line ends. Names are short, and what has no end within a thousand bytes is none.
fn line_length(bytes: &[u8]) -> Option<usize> {
    bytes.iter().take(1000).position(|&byte| byte == b'\n')
}
