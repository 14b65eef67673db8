//! Ranks that find each other by variables of a launcher, each on a thread.

mod loss_scale;
mod nodes;

use super::{Accelerator, AcceleratorBuilder};
use crate::error::Result;
use crate::nn::{Linear, ParamStore};
use crate::state::PartialState;
use accelerate_core::config::{InitProcessGroupKwargs, ProjectConfiguration};
use rstest::rstest;
use std::net::TcpListener;
use std::time::Duration;

/// On how many machines two processes seem to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Machines {
    One,
    Two,
}

/// Runs `body` on two processes that meet as `init_method` says.
fn launched<T: Send>(
    builder: &AcceleratorBuilder,
    machines: Machines,
    init_method: &str,
    body: impl Fn(Accelerator) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let per_machine = if machines == Machines::One { 2 } else { 1 };
    launched_on((2, per_machine), &|_| builder.clone(), init_method, body)
}

/// Runs `body` on so many processes, of which so many are on each machine. Their variables name a place that another program has.
fn launched_on<T: Send>(
    (world_size, per_machine): (usize, usize),
    builder: &(dyn Fn(usize) -> AcceleratorBuilder + Sync),
    init_method: &str,
    body: impl Fn(Accelerator) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let kwargs = InitProcessGroupKwargs {
        init_method: Some(init_method.to_owned()),
        timeout: Some(Duration::from_secs(20)),
        ..Default::default()
    };
    let rank = |rank: usize| {
        let lookup = |name: &str| {
            Some(match name {
                "RANK" => rank.to_string(),
                "WORLD_SIZE" => world_size.to_string(),
                "LOCAL_RANK" => (rank % per_machine).to_string(),
                "LOCAL_WORLD_SIZE" => per_machine.to_string(),
                "MASTER_ADDR" => "127.0.0.1".to_owned(),
                "MASTER_PORT" => port.to_string(),
                _ => return None,
            })
        };
        let builder = builder(rank).cpu(true).kwargs_handler(kwargs.clone());
        body(builder.build_with(&lookup, PartialState::join)?)
    };
    std::thread::scope(|scope| {
        let rank = &rank;
        let others: Vec<_> = (1..world_size).map(|other| scope.spawn(move || rank(other))).collect();
        let first = rank(0);
        std::iter::once(first).chain(others.into_iter().map(|other| other.join().unwrap())).collect()
    })
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

#[test]
fn ranks_meet_where_the_init_method_says() {
    let folder = tempfile::tempdir().unwrap();
    for init_method in
        [format!("tcp://127.0.0.1:{}", free_port()), format!("file://{}", folder.path().join("store").display())]
    {
        let met = launched(&AcceleratorBuilder::default(), Machines::One, &init_method, |accelerator| {
            accelerator.wait_for_everyone()?;
            Ok((accelerator.process_index(), accelerator.num_processes()))
        });
        assert_eq!(met.unwrap(), [(0, 2), (1, 2)], "{init_method}");
    }
}

#[rstest]
#[case::main_process(None, Machines::Two, [true, false])]
#[case::first_of_each(Some(true), Machines::Two, [true, true])]
#[case::first_of_one(Some(true), Machines::One, [true, false])]
fn a_model_is_written_by_the_main_process_or_on_each_node(
    #[case] save_on_each_node: Option<bool>,
    #[case] machines: Machines,
    #[case] wanted: [bool; 2],
) {
    let project = ProjectConfiguration { save_on_each_node, ..Default::default() };
    let builder = AcceleratorBuilder::default().project_config(project);
    let folder = tempfile::tempdir().unwrap();
    let written = launched(&builder, machines, &format!("tcp://127.0.0.1:{}", free_port()), |accelerator| {
        let store = ParamStore::new(accelerator.device());
        Linear::new(store.root(), 1, 1, Default::default())?;
        // A disk of its own.
        let disk = folder.path().join(accelerator.process_index().to_string());
        accelerator.save_model(&store, &disk, &Default::default())?;
        Ok(disk.join("model.safetensors").exists())
    });
    assert_eq!(written.unwrap(), wanted);
}
