//! The footer and the headers of pages of a Parquet file: the structs of `parquet.thrift` (apache/parquet-format), each as the
//! numbers of its fields and their types.
//!
//! The parquet crate reads a field that it knows by its number and does not look at the type that is written beside it. Where
//! the two differ it goes on at another place than whoever looks at types, and may come to a list of any length whose elements
//! take no bytes, which it counts for ever. So types are compared before the crate sees a file.

use super::thrift::Shape::{self, Bool, List, Struct, Value};

const BYTE: Shape = Value(3);
const INTEGER_16: Shape = Value(4);
const INTEGER_32: Shape = Value(5);
const INTEGER_64: Shape = Value(6);
const DOUBLE: Shape = Value(7);
const TEXT: Shape = Value(8);

/// `FileMetaData`.
pub(super) const FOOTER: Shape = Struct(&[
    (1, INTEGER_32),
    (2, List(&SCHEMA_ELEMENT)),
    (3, INTEGER_64),
    (4, List(&ROW_GROUP)),
    (5, List(&KEY_VALUE)),
    (6, TEXT),
    (7, List(&Struct(&[(1, Struct(&[])), (2, Struct(&[]))]))),
    (8, ENCRYPTION),
    (9, TEXT),
]);

const SCHEMA_ELEMENT: Shape = Struct(&[
    (1, INTEGER_32),
    (2, INTEGER_32),
    (3, INTEGER_32),
    (4, TEXT),
    (5, INTEGER_32),
    (6, INTEGER_32),
    (7, INTEGER_32),
    (8, INTEGER_32),
    (9, INTEGER_32),
    (10, LOGICAL_TYPE),
]);

const TIME: Shape = Struct(&[(1, Bool), (2, Struct(&[(1, Struct(&[])), (2, Struct(&[])), (3, Struct(&[]))]))]);

const LOGICAL_TYPE: Shape = Struct(&[
    (1, Struct(&[])),
    (2, Struct(&[])),
    (3, Struct(&[])),
    (4, Struct(&[])),
    (5, Struct(&[(1, INTEGER_32), (2, INTEGER_32)])),
    (6, Struct(&[])),
    (7, TIME),
    (8, TIME),
    (10, Struct(&[(1, BYTE), (2, Bool)])),
    (11, Struct(&[])),
    (12, Struct(&[])),
    (13, Struct(&[])),
    (14, Struct(&[])),
    (15, Struct(&[])),
    (16, Struct(&[(1, BYTE)])),
    (17, Struct(&[(1, TEXT)])),
    (18, Struct(&[(1, TEXT), (2, INTEGER_32)])),
]);

const ROW_GROUP: Shape = Struct(&[
    (1, List(&COLUMN_CHUNK)),
    (2, INTEGER_64),
    (3, INTEGER_64),
    (4, List(&Struct(&[(1, INTEGER_32), (2, Bool), (3, Bool)]))),
    (5, INTEGER_64),
    (6, INTEGER_64),
    (7, INTEGER_16),
]);

const COLUMN_CHUNK: Shape = Struct(&[
    (1, TEXT),
    (2, INTEGER_64),
    (3, COLUMN),
    (4, INTEGER_64),
    (5, INTEGER_32),
    (6, INTEGER_64),
    (7, INTEGER_32),
    (8, Struct(&[(1, Struct(&[])), (2, Struct(&[(1, List(&TEXT)), (2, TEXT)]))])),
    (9, TEXT),
]);

/// `ColumnMetaData`.
const COLUMN: Shape = Struct(&[
    (1, INTEGER_32),
    (2, List(&INTEGER_32)),
    (3, List(&TEXT)),
    (4, INTEGER_32),
    (5, INTEGER_64),
    (6, INTEGER_64),
    (7, INTEGER_64),
    (8, List(&KEY_VALUE)),
    (9, INTEGER_64),
    (10, INTEGER_64),
    (11, INTEGER_64),
    (12, STATISTICS),
    (13, List(&Struct(&[(1, INTEGER_32), (2, INTEGER_32), (3, INTEGER_32)]))),
    (14, INTEGER_64),
    (15, INTEGER_32),
    (16, Struct(&[(1, INTEGER_64), (2, List(&INTEGER_64)), (3, List(&INTEGER_64))])),
    (17, Struct(&[(1, BOUNDING_BOX), (2, List(&INTEGER_32))])),
]);

const STATISTICS: Shape =
    Struct(&[(1, TEXT), (2, TEXT), (3, INTEGER_64), (4, INTEGER_64), (5, TEXT), (6, TEXT), (7, Bool), (8, Bool)]);

const BOUNDING_BOX: Shape =
    Struct(&[(1, DOUBLE), (2, DOUBLE), (3, DOUBLE), (4, DOUBLE), (5, DOUBLE), (6, DOUBLE), (7, DOUBLE), (8, DOUBLE)]);

const KEY_VALUE: Shape = Struct(&[(1, TEXT), (2, TEXT)]);

/// `PageHeader`.
pub(super) const PAGE_HEADER: Shape = Struct(&[
    (1, INTEGER_32),
    (2, INTEGER_32),
    (3, INTEGER_32),
    (4, INTEGER_32),
    (5, Struct(&[(1, INTEGER_32), (2, INTEGER_32), (3, INTEGER_32), (4, INTEGER_32), (5, STATISTICS)])),
    (6, Struct(&[])),
    (7, Struct(&[(1, INTEGER_32), (2, INTEGER_32), (3, Bool)])),
    (8, PAGE_OF_VERSION_2),
]);

const PAGE_OF_VERSION_2: Shape = Struct(&[
    (1, INTEGER_32),
    (2, INTEGER_32),
    (3, INTEGER_32),
    (4, INTEGER_32),
    (5, INTEGER_32),
    (6, INTEGER_32),
    (7, Bool),
    (8, STATISTICS),
]);

const ENCRYPTION: Shape = Struct(&[(1, CIPHER), (2, CIPHER)]);

const CIPHER: Shape = Struct(&[(1, TEXT), (2, TEXT), (3, Bool)]);

#[cfg(test)]
mod tests {
    use super::super::thrift::Compact;
    use super::*;

    #[test]
    fn types_that_are_not_those_of_the_specification_are_refused() {
        let sizes = [0x15, 0, 0x15, 0, 0x15, 0];
        for (case, rest, wanted) in [
            ("the end", &[0][..], true),
            ("no end", &[], false),
            ("statistics with a boolean", &[0x2c, 0x5c, 0x71, 0, 0, 0], true),
            ("a list in place of a boolean", &[0x2c, 0x5c, 0x79, 0x05, 0, 0, 0], false),
            ("a field of a later specification", &[0x69, 0x15, 0, 0], true),
            ("a list of booleans", &[0x69, 0x11, 1, 0], false),
        ] {
            let header = [&sizes[..], rest].concat();
            assert_eq!(Compact { rest: &header }.conform(&PAGE_HEADER).is_some(), wanted, "{case}");
        }
        assert!(Compact { rest: &[0x12, 0x15, 0, 0] }.conform(&PAGE_HEADER).is_none(), "a page type that is a boolean");
        assert!(Compact { rest: &[0x15, 0, 0x19, 0x15, 0, 0] }.conform(&FOOTER).is_none(), "a schema of numbers");
    }
}
