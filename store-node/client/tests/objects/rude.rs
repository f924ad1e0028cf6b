//! A client that does not keep to what was agreed.

use std::os::fd::OwnedFd;
use std::time::Duration;

use kvasir_attach::AttachError;
use kvasir_attach::line::{self, Line, LineDescriptors, LineReceiver, LineSender};
use kvasir_client::{Key, PutOptions, Tier};
use kvasir_proto::v1;
use prost::Message;
use v1::client_to_node::Message as ToNode;
use v1::node_to_client::Message as FromNode;

use crate::{Node, keys, put_context, small_ssd, until};

/// It says what it likes.
struct Rude {
    sender: LineSender,
    receiver: LineReceiver,
}

impl Rude {
    fn open(node: &Node) -> Self {
        let options = node.options();
        let request = v1::OpenRequest {
            client: "rude".into(),
            tenant: options.tenant,
            namespace: options.namespace,
            object_bytes_max: options.object_bytes_max,
        };
        let reply = node.runtime.block_on(async {
            let channel = line::channel(&options.attach_dir.join("attach.sock")).await;
            let mut opens = v1::objects_client::ObjectsClient::new(channel.expect("it listens"));
            opens.open(request).await.expect("it may open").into_inner()
        });
        let socket = options.attach_dir.join(&reply.descriptor_socket);
        let (connection, descriptors) =
            line::take_descriptors::<5>(&socket, &reply.token).expect("five descriptors");
        let [_slots, _generations, control, node_ringer, bell]: [OwnedFd; 5] = descriptors;
        let descriptors = LineDescriptors { control, node_ringer, bell };
        let (sender, receiver) =
            Line::open(reply.attach_epoch, descriptors, connection).expect("a line");
        Rude { sender, receiver }
    }

    fn say(&mut self, request: u64, message: ToNode) {
        let message = v1::ClientToNode { request, message: Some(message) };
        self.sender.send(&message.encode_to_vec()).expect("the node takes it");
    }

    fn hears(&mut self) -> Result<v1::NodeToClient, AttachError> {
        loop {
            if let Some(record) = self.receiver.try_recv()? {
                return Ok(v1::NodeToClient::decode(record).expect("an answer"));
            }
            self.receiver.wait(Duration::from_secs(1))?;
        }
    }

    /// Of an object that is there.
    fn reserve(&mut self, request: u64, key: Key) {
        let keys = key.0.to_vec();
        self.say(request, ToNode::Reserve(v1::ReserveObjects { keys, lease_ms: 10_000 }));
        let answer = self.hears().expect("an answer");
        let Some(FromNode::Reserved(reserved)) = answer.message else { panic!("{answer:?}") };
        assert_eq!((answer.request, &reserved.slots[..]), (request, &[u32::MAX][..]));
    }

    fn keep(&mut self, request: u64, reserve: u64) {
        let class = v1::ObjectClass::Context.into();
        let (objects, checksums, ttl_ms) = (vec![0], Vec::new(), 60_000);
        let commit = v1::CommitObjects { reserve, objects, checksums, class, ttl_ms };
        self.say(request, ToNode::Commit(commit));
    }
}

/// One whose disk does what a file says.
fn with_faults() -> Node {
    Node::start(|config, dir| {
        config.ssd = small_ssd(dir);
        config.ssd.faults_file = Some(dir.join("faults"));
    })
}

/// From when it returns on, what is asked of the disk does not end.
fn hang(node: &Node) {
    std::fs::write(node.dir.path().join("faults"), "hang").expect("written");
    std::thread::sleep(Duration::from_millis(60));
}

fn go_on(node: &Node) {
    std::fs::write(node.dir.path().join("faults"), "").expect("written");
}

#[test]
fn who_gets_twice_under_one_number_is_shut_out_and_what_was_read_for_it_is_let_go() {
    let node = with_faults();
    let client = node.client();
    let all = keys(&client, 2);
    put_context(&client, &[(all[0], b"one"), (all[1], b"two")]);
    // They make room in memory.
    let others: Vec<Key> = (0..200_u64).map(|at| client.key(&(7_000 + at).to_le_bytes())).collect();
    for key in others {
        client.put(&[(key, b"another")], &PutOptions::default()).expect("room");
    }
    let below = [Some(Tier::Ssd); 2];
    until("they are below alone", || client.find(&all).expect("an answer") == below);
    let mut rude = Rude::open(&node);
    hang(&node);
    for key in all {
        let keys = key.0.to_vec();
        let get = v1::GetObjects { keys, ..v1::GetObjects::default() };
        rude.say(1, ToNode::Get(get));
    }
    let error = rude.hears().expect_err("it is not answered");
    assert!(matches!(error, AttachError::Lost), "{error}");
    go_on(&node);
    until("nothing is held for it", || node.metric("kvasir_store_pins") == 0.0);
}

#[test]
fn who_commits_two_puts_under_one_number_is_shut_out_and_nobody_else_is() {
    let node = with_faults();
    let client = node.client();
    let all = keys(&client, 3);
    client.put(&[(all[0], b"one"), (all[1], b"two")], &PutOptions::default()).expect("room");
    put_context(&client, &[(all[2], b"three")]);
    let mut rude = Rude::open(&node);
    rude.reserve(1, all[0]);
    rude.reserve(2, all[1]);
    // What is kept is not answered before the disk has it.
    hang(&node);
    rude.keep(3, 1);
    rude.keep(3, 2);
    let error = rude.hears().expect_err("it is not answered");
    assert!(matches!(error, AttachError::Lost), "{error}");
    assert_eq!(node.metric("kvasir_store_forced_detaches_total{kind=\"object_client\"}"), 1.0);
    go_on(&node);
    let got = client.get(&all).expect("an answer");
    assert!(got.iter().all(Option::is_some));
    drop(got);
    until("it holds nothing", || node.metric("kvasir_store_pins") == 0.0);
    put_context(&client, &[(all[0], b"one"), (all[1], b"two")]);
}
