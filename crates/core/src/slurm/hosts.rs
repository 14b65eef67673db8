//! Host lists as Slurm writes them.

use crate::environment::MAX_WORLD_SIZE;

/// All hosts of a Slurm host list, in its order: `node[03-05,7]` is `node03`, `node04`, `node05`, `node7`.
///
/// Several brackets in one name stand for all combinations, the last one changing fastest. `None` when the text is no host list:
/// empty, a bracket without its partner, a range that runs backwards, or more hosts than a run may have processes.
///
/// ```
/// use accelerate_core::slurm::expand_hosts;
/// assert_eq!(expand_hosts("node[08-10],login1").unwrap(), ["node08", "node09", "node10", "login1"]);
/// assert_eq!(expand_hosts("node[08-10"), None);
/// ```
pub fn expand_hosts(list: &str) -> Option<Vec<String>> {
    let mut hosts = Vec::new();
    let mut rest = list.trim();
    loop {
        let (name, after) = rest.split_at(end_of_name(rest));
        let names = names(name)?;
        if names.len() > MAX_WORLD_SIZE - hosts.len() {
            return None;
        }
        hosts.extend(names);
        match after.strip_prefix(',') {
            Some(more) => rest = more,
            None => return Some(hosts),
        }
    }
}

/// Where the comma after the first name is, outside brackets.
fn end_of_name(list: &str) -> usize {
    let mut is_inside = false;
    let ends = |(_, character): &(usize, char)| {
        match character {
            '[' => is_inside = true,
            ']' => is_inside = false,
            _ => {}
        }
        *character == ',' && !is_inside
    };
    list.char_indices().find(ends).map_or(list.len(), |(position, _)| position)
}

/// The hosts that one name with brackets stands for.
fn names(name: &str) -> Option<Vec<String>> {
    let mut names = vec![String::new()];
    let mut rest = name;
    while !rest.is_empty() {
        let (plain, after) = rest.split_at(rest.find(['[', ']']).unwrap_or(rest.len()));
        names.iter_mut().for_each(|name| name.push_str(plain));
        rest = after;
        if !rest.is_empty() {
            let (inside, after) = rest.strip_prefix('[')?.split_once(']')?;
            let numbers = numbers(inside)?;
            if names.len().checked_mul(numbers.len())? > MAX_WORLD_SIZE {
                return None;
            }
            names = names.iter().flat_map(|name| numbers.iter().map(move |number| format!("{name}{number}"))).collect();
            rest = after;
        }
    }
    let is_host = |name: &String| !name.is_empty() && !name.contains(char::is_whitespace);
    names.iter().all(is_host).then_some(names)
}

/// `03-05,7` is 03, 04, 05, 7: a number keeps the width in which the first one of its range is written.
fn numbers(ranges: &str) -> Option<Vec<String>> {
    let mut numbers = Vec::new();
    for range in ranges.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        if !is_number(first) || !is_number(last) {
            return None;
        }
        let (from, to): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
        let count = usize::try_from(to.checked_sub(from)?).ok()?.checked_add(1)?;
        if count > MAX_WORLD_SIZE - numbers.len() {
            return None;
        }
        numbers.extend((from..=to).map(|number| format!("{number:0width$}", width = first.len())));
    }
    Some(numbers)
}
