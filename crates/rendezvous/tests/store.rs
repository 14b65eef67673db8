//! Ranks, strangers and servers that stop, over real sockets.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate_rendezvous::{Client, ConnectOptions, Error, Memory, Secret, Server, ServerOptions, Store};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

const SOON: Duration = Duration::from_millis(50);
const LATER: Duration = Duration::from_secs(60);

fn secret() -> Secret {
    Secret::new(*b"of this run")
}

fn server() -> Server {
    let address = "127.0.0.1:0".parse().unwrap();
    Server::bind(&ServerOptions { address, secret: secret(), max_connections: 64 }).unwrap()
}

fn options(port: u16) -> ConnectOptions {
    ConnectOptions { host: "127.0.0.1".to_owned(), port, secret: secret(), timeout: LATER }
}

fn go_on(_: Duration, _: &Error) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn client(server: &Server) -> Client {
    Client::connect(options(server.address().port()), go_on).unwrap()
}

/// The same calls, in the memory of a process and from another one.
fn behaves_as_a_store(store: &dyn Store) {
    assert!(!store.check(&[b"a"], LATER).unwrap());
    store.set(b"a", b"1", LATER).unwrap();
    store.set(b"", &[0, 255], LATER).unwrap();
    assert!(store.check(&[b"a", b""], LATER).unwrap());
    assert!(!store.check(&[b"a", b"b"], LATER).unwrap());
    assert_eq!(store.get(b"", LATER).unwrap(), [0, 255]);
    assert_eq!(store.add(b"a", -5, LATER).unwrap(), -4);
    assert_eq!(store.add(b"new", 7, LATER).unwrap(), 7);
    assert!(store.add(b"", 1, LATER).unwrap_err().to_string().contains("not a decimal number"));
    store.set(b"most", i64::MAX.to_string().as_bytes(), LATER).unwrap();
    assert!(store.add(b"most", 1, LATER).unwrap_err().to_string().contains("more than 64 bits"));
    store.append(b"text", b"one ", LATER).unwrap();
    store.append(b"text", b"two", LATER).unwrap();
    assert_eq!(store.get(b"text", LATER).unwrap(), b"one two");
    // As c10d has it: absent and nothing expected, absent and something expected, present and equal, present and other.
    assert_eq!(store.compare_set(b"c", b"", b"first", LATER).unwrap(), b"first");
    assert_eq!(store.compare_set(b"absent", b"x", b"y", LATER).unwrap(), b"x");
    assert!(!store.check(&[b"absent"], LATER).unwrap());
    assert_eq!(store.compare_set(b"c", b"first", b"second", LATER).unwrap(), b"second");
    assert_eq!(store.compare_set(b"c", b"", b"third", LATER).unwrap(), b"second");
    assert_eq!(store.num_keys(LATER).unwrap(), 6);
    assert!(store.delete_key(b"c", LATER).unwrap());
    assert!(!store.delete_key(b"c", LATER).unwrap());
    let error = store.wait(&[b"a", b"nobody", b"sets"], SOON).unwrap_err();
    assert!(error.is_timeout() && error.to_string().contains("nobody, sets"), "{error}");
    assert!(store.get(b"nobody", SOON).unwrap_err().is_timeout());
    store.wait(&[b"a", b"text"], SOON).unwrap();
    let large = vec![0; (1 << 24) + 1];
    assert!(store.set(b"large", &large, LATER).unwrap_err().to_string().contains("a value of 16777217 bytes"));
    store.set(b"large", &large[1..], LATER).unwrap();
    assert_eq!(store.get(b"large", LATER).unwrap(), large[1..]);
    assert!(store.set(&large[..5000], b"", LATER).unwrap_err().to_string().contains("a key of 5000 bytes"));
}

#[test]
fn a_memory_is_a_store() {
    behaves_as_a_store(&Memory::default());
}

#[test]
fn a_client_is_a_store() {
    behaves_as_a_store(&client(&server()));
}

#[test]
fn memory_is_bounded() {
    let (store, value) = (Memory::default(), vec![0; 1 << 24]);
    let full = (0u8..).find_map(|key| store.set(&[key], &value, LATER).err()).unwrap();
    assert!(full.to_string().contains("a store"), "{full}");
    // What replaces a value needs no room of its own, and what is deleted makes room.
    store.set(&[0], &value[1..], LATER).unwrap();
    store.delete_key(&[1], LATER).unwrap();
    store.set(&[200], &value, LATER).unwrap();
}

#[test]
fn who_waits_holds_up_nobody() {
    let server = server();
    let client = Arc::new(client(&server));
    let waiting = Arc::clone(&client);
    let waits = thread::spawn(move || waiting.get(b"late", LATER));
    let other = Arc::clone(&client);
    let waits_too = thread::spawn(move || other.wait(&[b"late"], LATER));
    // On the same client, while its two requests wait.
    client.set(b"late", b"now", LATER).unwrap();
    assert_eq!(waits.join().unwrap().unwrap(), b"now");
    waits_too.join().unwrap().unwrap();
}

#[test]
fn adding_is_atomic_over_clients() {
    let server = server();
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let client = client(&server);
                for _ in 0..100 {
                    client.add(b"count", 1, LATER).unwrap();
                }
            });
        }
    });
    assert_eq!(server.memory().add(b"count", 0, LATER).unwrap(), 400);
}

#[test]
fn another_secret_is_told_at_once() {
    let server = server();
    for wrong in [Secret::new(*b"of another run"), Secret::new([])] {
        let options = ConnectOptions { secret: wrong, ..options(server.address().port()) };
        let error = Client::connect(options, |_, _| panic!("there is nothing to wait for")).unwrap_err();
        assert!(matches!(error, Error::OtherSecret { .. }) && error.is_connection(), "{error}");
    }
    // Nor does a client talk to a server that cannot prove itself.
    let address = "127.0.0.1:0".parse().unwrap();
    let none = Server::bind(&ServerOptions { address, secret: Secret::new([]), max_connections: 1 }).unwrap();
    assert!(matches!(Client::connect(options(none.address().port()), go_on), Err(Error::OtherSecret { .. })));
}

/// A server of another kind, for one connection.
fn impostor(act: impl FnOnce(TcpStream) + Send + 'static) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || act(listener.accept().unwrap().0));
    port
}

#[test]
fn another_program_at_the_port_is_told_at_once() {
    let port = impostor(|mut stream| {
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n").unwrap();
        let _ = stream.read(&mut [0; 64]);
    });
    let error = Client::connect(options(port), |_, _| panic!("there is nothing to wait for")).unwrap_err();
    assert!(matches!(error, Error::OtherProgram { .. }), "{error}");
}

#[test]
fn a_program_that_stays_silent_takes_no_longer_than_the_deadline() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let options = ConnectOptions { timeout: SOON, ..options(listener.local_addr().unwrap().port()) };
    let error = Client::connect(options, go_on).unwrap_err();
    assert!(error.is_timeout() && error.to_string().contains("has not answered within 50ms"), "{error}");
}

#[test]
fn nobody_there_is_told_while_it_is_waited_for() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut told = 0;
    let error = Client::connect(ConnectOptions { timeout: SOON, ..options(port) }, |_, reason| {
        assert!(reason.to_string().contains(&port.to_string()));
        told += 1;
        ControlFlow::Continue(())
    });
    assert!(error.unwrap_err().is_connection() && told > 0);
}

#[test]
fn who_waits_may_break_off_long_before_the_deadline() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut told = 0;
    let error = Client::connect(options(port), |_, _| {
        told += 1;
        if told < 3 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    });
    assert!(error.unwrap_err().is_connection() && told == 3);
}

#[test]
fn a_name_without_address_is_told_at_once() {
    // Labels of more than 63 letters have none, and no name server is asked.
    let options = ConnectOptions { host: "x".repeat(64), ..options(1) };
    let error = Client::connect(options, |_, _| panic!("there is nothing to wait for")).unwrap_err();
    assert!(matches!(error, Error::UnknownHost { .. }), "{error}");
}

#[test]
fn a_server_that_comes_later_is_found() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut late = None;
    let bind = |_: Duration, _: &Error| {
        let address = format!("127.0.0.1:{port}").parse().unwrap();
        late.get_or_insert_with(|| {
            Server::bind(&ServerOptions { address, secret: secret(), max_connections: 4 }).unwrap()
        });
        ControlFlow::Continue(())
    };
    let client = Client::connect(options(port), bind).unwrap();
    client.set(b"a", b"b", LATER).unwrap();
}

#[test]
fn a_server_that_stops_answering_is_an_error_by_the_deadline() {
    // It proves itself by passing everything on to a real server, and then passes nothing on any more.
    let real = server();
    let target = real.address();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let stopped = thread::spawn(move || {
        let client = listener.accept().unwrap().0;
        let server = TcpStream::connect(target).unwrap();
        let (mut greeting, mut proof, mut welcome) = ([0; 40], [0; 64], [0; 33]);
        (&server).read_exact(&mut greeting).unwrap();
        (&client).write_all(&greeting).unwrap();
        (&client).read_exact(&mut proof).unwrap();
        (&server).write_all(&proof).unwrap();
        (&server).read_exact(&mut welcome).unwrap();
        (&client).write_all(&welcome).unwrap();
        (client, server, listener)
    });
    let client = Client::connect(options(port), go_on).unwrap();
    let _kept_open = stopped.join().unwrap();
    let begin = Instant::now();
    // A request that a server answers at once; what the way may take is added.
    let error = client.check(&[b"a"], SOON).unwrap_err();
    assert!(error.is_timeout() && error.to_string().contains("is it stopped"), "{error}");
    assert!(begin.elapsed() < Duration::from_secs(30));
}

#[test]
fn a_server_that_is_gone_ends_all_waits() {
    let server = server();
    let (near, far) = (server.memory(), client(&server));
    thread::scope(|scope| {
        let waits = [
            scope.spawn(move || near.wait(&[b"never"], LATER)),
            // The server may be gone before it has answered the first request.
            scope.spawn(move || far.set(b"is here", b"", LATER).and_then(|()| far.wait(&[b"never"], LATER))),
        ];
        server.memory().wait(&[b"is here"], LATER).unwrap();
        drop(server);
        for wait in waits {
            assert!(wait.join().unwrap().unwrap_err().is_connection());
        }
    });
}

#[test]
fn strangers_neither_read_nor_write_nor_keep_others_out() {
    let server = server();
    let address = server.address();
    server.memory().set(b"own", b"secret value", LATER).unwrap();
    // More of them than are borne at a time, and each stays.
    let strangers: Vec<TcpStream> = (0..300).map(|_| TcpStream::connect(address).unwrap()).collect();
    let member = client(&server);
    assert_eq!(member.get(b"own", LATER).unwrap(), b"secret value");
    // What they send is not taken for a request.
    for mut stranger in strangers {
        let request = [&12u32.to_le_bytes()[..], &[0; 60]].concat();
        let _closed_already = stranger.write_all(&request);
        let _closed_already = stranger.shutdown(Shutdown::Write);
        let mut answer = Vec::new();
        let _closed_already = stranger.read_to_end(&mut answer);
        assert!(answer.len() <= 41 && !answer.windows(6).any(|part| part == b"secret"), "{answer:?}");
    }
    assert_eq!(server.memory().num_keys(LATER).unwrap(), 1);
}

/// A connection from that address of the loopback.
fn connected_from(address: [u8; 4], server: &Server) -> TcpStream {
    use rustix::net::{AddressFamily, SocketType, bind, connect, socket};
    let socket = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    bind(&socket, &SocketAddr::from((address, 0))).unwrap();
    connect(&socket, &server.address()).unwrap();
    socket.into()
}

/// It has been greeted, and takes its time to answer.
#[cfg(target_os = "linux")]
#[test]
fn a_crowd_from_one_machine_keeps_out_nobody_from_another() {
    let server = server();
    let mut slow = connected_from([127, 0, 0, 2], &server);
    slow.read_exact(&mut [0; 40]).unwrap();
    let mut crowd: Vec<_> = (0..300).map(|_| connected_from([127, 0, 0, 3], &server)).collect();
    // Who is greeted has been made room for.
    crowd.last_mut().unwrap().read_exact(&mut [0; 40]).unwrap();
    let mut greeting = Vec::new();
    assert!(crowd[0].read_to_end(&mut greeting).is_ok_and(|_| greeting.len() <= 40), "the oldest has been sent away");
    slow.set_nonblocking(true).unwrap();
    assert_eq!(slow.read(&mut [0]).unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
}

#[test]
fn members_are_counted() {
    let address = "127.0.0.1:0".parse().unwrap();
    let server = Server::bind(&ServerOptions { address, secret: secret(), max_connections: 2 }).unwrap();
    let members = [client(&server), client(&server)];
    members.iter().for_each(|member| member.set(b"a", b"", LATER).unwrap());
    let third = Client::connect(options(address_port(&server)), go_on).unwrap();
    assert!(third.set(b"b", b"", LATER).unwrap_err().is_connection());
    members.iter().for_each(|member| member.set(b"a", b"", LATER).unwrap());
}

fn address_port(server: &Server) -> u16 {
    server.address().port()
}

#[test]
fn a_taken_port_says_so() {
    let server = server();
    let second = Server::bind(&ServerOptions { address: server.address(), secret: secret(), max_connections: 1 });
    assert!(second.unwrap_err().is_address_in_use());
}

#[test]
fn a_port_is_free_once_its_server_has_been_dropped() {
    let mut address = "127.0.0.1:0".parse().unwrap();
    for _ in 0..200 {
        let server = Server::bind(&ServerOptions { address, secret: secret(), max_connections: 1 }).unwrap();
        address = server.address();
    }
}

#[test]
fn secrets_are_random_and_never_shown() {
    let [one, other] = [(); 2].map(|()| Secret::random().unwrap());
    assert!(one.len() == 64 && one != other);
    assert_eq!(format!("{:?} {:?}", Secret::new(one), Secret::new([])), "Secret(..) Secret(none)");
}
