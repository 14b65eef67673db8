//! Numbers of a checkpoint's tensors, in the order of the full tensors' elements, whatever pieces they are saved in.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use accelerate_core::checkpoint::{DESCRIPTION, SavedObject, SavedTensor};
use accelerate_core::layout::{Copied, Layout};
use accelerate_core::weight_files::{Header, Notes, SavedFile};

use super::check::{check_coverage, check_piece};
use super::error::{Fault, Problem};
use super::files::open;
use super::folder::{OpenCheckpoint, check_size};

/// A process may have about a thousand files open, and two checkpoints share them.
const MOST_OPEN: usize = 64;

/// The weight files of a checkpoint, opened when something in them is wanted.
#[derive(Debug)]
pub(super) struct Reader<'a> {
    checkpoint: &'a OpenCheckpoint,
    /// By position in the description's list, with what the file says about itself.
    headers: HashMap<usize, (Header, BTreeMap<String, String>)>,
    /// The one that was opened last stands last.
    open: VecDeque<(usize, File)>,
}

/// Bytes in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Span {
    file: usize,
    at: u64,
    num_bytes: u64,
}

/// The bytes of a tensor, from its first element to its last.
#[derive(Debug)]
pub(super) struct Bytes {
    spans: VecDeque<Span>,
}

impl Bytes {
    pub(super) fn len(&self) -> u64 {
        self.spans.iter().fold(0, |sum: u64, span| sum.saturating_add(span.num_bytes))
    }
}

impl<'a> Reader<'a> {
    pub(super) fn new(checkpoint: &'a OpenCheckpoint) -> Self {
        Self { checkpoint, headers: HashMap::new(), open: VecDeque::new() }
    }

    /// The folder of the checkpoint.
    pub(super) fn folder(&self) -> &Path {
        &self.checkpoint.save.folder
    }

    /// Where all elements of a tensor are. Each is there once, or it is an error.
    pub(super) fn bytes_of(&mut self, object: &str, name: &str, saved: &SavedTensor) -> Result<Bytes, Fault> {
        let pieces = self.pieces(name, saved)?;
        check_coverage(object, name, saved).map_err(|problem| problem.at(DESCRIPTION))?;
        let layouts: Vec<&Layout> = saved.pieces.iter().filter_map(|piece| piece.layout.as_ref()).collect();
        if layouts.len() < saved.pieces.len() {
            return Ok(Bytes { spans: pieces.into() });
        }
        let element_bytes = (saved.dtype.bitsize() / 8) as u64;
        let span = |Copied { source, from, .. }: Copied| {
            let Span { file, at, .. } = pieces[source];
            let (start, num_bytes) = (from.start as u64 * element_bytes, from.len() as u64 * element_bytes);
            Span { file, at: at + start, num_bytes }
        };
        // All elements are there, as was checked.
        let copies = Layout::full(saved.shape.clone()).copies_from(layouts).unwrap_or_default();
        Ok(Bytes { spans: copies.into_iter().map(span).collect() })
    }

    /// The bytes of one piece after the other, as they are saved.
    pub(super) fn bytes_of_pieces(&mut self, name: &str, saved: &SavedTensor) -> Result<Bytes, Fault> {
        Ok(Bytes { spans: self.pieces(name, saved)?.into() })
    }

    /// The file of each piece of a tensor, and the place of its first element there. Together they have each element once.
    pub(super) fn places_of(
        &mut self,
        object: &str,
        name: &str,
        saved: &SavedTensor,
    ) -> Result<Vec<(usize, u64)>, Fault> {
        if !saved.is_elementwise {
            return Err(Problem::InBlocks { object: object.to_owned(), name: name.to_owned() }.at(DESCRIPTION));
        }
        let spans = self.pieces(name, saved)?;
        check_coverage(object, name, saved).map_err(|problem| problem.at(DESCRIPTION))?;
        Ok(spans.into_iter().map(|span| (span.file, span.at)).collect())
    }

    fn pieces(&mut self, name: &str, saved: &SavedTensor) -> Result<Vec<Span>, Fault> {
        let mut spans = Vec::new();
        for piece in &saved.pieces {
            let file_name = self.file(piece.file)?.name.clone();
            let (header, _) = self.header(piece.file)?;
            let found = header.get(name);
            check_piece(found, name, saved, piece).map_err(|problem| problem.at(file_name))?;
            let (start, end) = found.map_or((0, 0), |found| (found.start, found.end));
            spans.push(Span { file: piece.file, at: header.data_at() + start, num_bytes: end - start });
        }
        Ok(spans)
    }

    /// The next bytes of a tensor. There are as many, or more.
    pub(super) fn read(&mut self, bytes: &mut Bytes, mut buffer: &mut [u8]) -> Result<(), Fault> {
        while !buffer.is_empty() {
            let Some(span) = bytes.spans.front_mut() else {
                return Err(Problem::Unreadable(io::ErrorKind::UnexpectedEof.into()).at(DESCRIPTION));
            };
            let now = span.num_bytes.min(buffer.len() as u64);
            let (part, rest) = buffer.split_at_mut(now as usize);
            buffer = rest;
            let (number, at) = (span.file, span.at);
            span.at += now;
            span.num_bytes -= now;
            if span.num_bytes == 0 {
                bytes.spans.pop_front();
            }
            let read = self.opened(number)?.read_exact_at(part, at).map_err(Problem::of);
            if let Err(problem) = read {
                return Err(problem.at(self.file(number)?.name.clone()));
            }
        }
        Ok(())
    }

    fn file(&self, number: usize) -> Result<&'a SavedFile, Fault> {
        let name = self.checkpoint.description.files.get(number).map_or(DESCRIPTION, String::as_str);
        let listed = self.checkpoint.save.file(name);
        listed.ok_or_else(|| Problem::NotListed { by: "the description" }.at(name))
    }

    /// What the files with the tensors of an object say about themselves.
    pub(super) fn notes_of(&mut self, object: &SavedObject) -> Result<Notes, Fault> {
        let pieces = object.tensors.values().flat_map(|tensor| &tensor.pieces);
        let mut notes = Notes::default();
        for file in pieces.map(|piece| piece.file).collect::<BTreeSet<_>>() {
            let (_, of_file) = self.header(file)?;
            notes.add(of_file.clone());
        }
        Ok(notes)
    }

    fn header(&mut self, number: usize) -> Result<&(Header, BTreeMap<String, String>), Fault> {
        if !self.headers.contains_key(&number) {
            let file = self.file(number)?;
            let mut content = self.opened(number)?;
            let header = Header::read_with_notes(&mut content, file.bytes);
            let header = header.map_err(|error| Problem::Format(error).at(&file.name))?;
            self.headers.insert(number, header);
        }
        self.headers.get(&number).ok_or_else(|| Problem::Missing.at(DESCRIPTION))
    }

    /// An open file, at its beginning if it was not open.
    fn opened(&mut self, number: usize) -> Result<&File, Fault> {
        let place = match self.open.iter().position(|(open, _)| *open == number) {
            Some(place) => place,
            None => {
                let file = self.file(number)?;
                let (content, found_bytes) =
                    open(&self.checkpoint.save.path_of(file)).map_err(|problem| problem.at(&file.name))?;
                check_size(file, found_bytes).map_err(|problem| problem.at(&file.name))?;
                if self.open.len() == MOST_OPEN {
                    self.open.pop_front();
                }
                self.open.push_back((number, content));
                self.open.len() - 1
            }
        };
        Ok(&self.open[place].1)
    }
}
