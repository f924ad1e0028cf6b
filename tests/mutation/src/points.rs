//! The list of mutations. Each line names a mutation, describes the fault of the mutated program, and
//! names the test that must fail.

/// The test that must fail when a mutation is applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finder {
    /// The cluster simulation, within 1,000 seeds.
    ClusterSimulation,
    /// The failover simulation of the transfer engine, within 300 seeds.
    FailoverSimulation,
    /// `cargo test` with these arguments.
    Tests(&'static str),
    /// The tests in `transfer/tests/parts` of this name, in the virtual machine of `tests/verbs-vm`.
    VirtualMachine(&'static str),
}

/// One line of the list.
#[derive(Clone, Copy, Debug)]
pub struct Point {
    pub mutation: Mutation,
    pub name: &'static str,
    /// The fault of the mutated program.
    pub effect: &'static str,
    pub finder: Finder,
}

impl Point {
    /// The mutation of this name.
    pub fn find(name: &str) -> Option<Point> {
        POINTS.iter().copied().find(|point| point.name == name)
    }
}

macro_rules! mutations {
    ($(#[doc = $effect:literal] $name:ident: $finder:expr,)+) => {
        /// A guard that is switched off, or a rule that is changed.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Mutation {
            $(#[doc = $effect] $name,)+
        }

        /// All mutations.
        pub const POINTS: &[Point] = &[
            $(Point {
                mutation: Mutation::$name,
                name: stringify!($name),
                effect: $effect,
                finder: $finder,
            },)+
        ];
    };
}

mutations! {
    // The store node: `kvasir-blocks`, `kvasir-log`, and the shells that the cluster simulation models.
    /// An engine learns its slots while a fetch may still write to them.
    BindBeforeFetchSettled: Finder::ClusterSimulation,
    /// An engine learns its slots while an SSD read still writes to them.
    BindBeforeSsdRead: Finder::ClusterSimulation,
    /// A receiver accepts a transfer whose checksum is wrong.
    ArrivalChecksumIgnored: Finder::ClusterSimulation,
    /// The log accepts an extent whose checksum is wrong.
    ExtentChecksumIgnored: Finder::ClusterSimulation,
    /// An expired put frees its slots while its client may still write to them.
    PutSlotsFreedWhileWriting: Finder::ClusterSimulation,
    /// A late confirmation of a failed attempt to cut off a writer counts for the next attempt.
    StaleCutConfirmationCounts: Finder::Tests("-p kvasir-blocks --lib writers"),
    /// A node acknowledges a context of two replicas when it has one.
    MissingReplicaIgnored: Finder::ClusterSimulation,
    /// Cleaning gives a moved extent a generation newer than concurrent writes of its block.
    CleaningRenewsGeneration: Finder::ClusterSimulation,
    /// A replica of a context counts before the other node has agreed to keep it.
    ReplicaCountedBeforeKeep: Finder::ClusterSimulation,
    /// A replica of a context counts although it expires before the context.
    ShorterReplicaCounts: Finder::ClusterSimulation,
    /// A share frees its slots while a copy from the engine's pool still writes to them.
    PoolCopyNotAwaited: Finder::ClusterSimulation,
    /// Blocks are not pinned while they are demoted to the SSD.
    DemotionNotPinned: Finder::ClusterSimulation,
    /// A node reports itself drained while only it holds some of its contexts.
    DrainedBeforeContextsMoved: Finder::ClusterSimulation,
    /// A node reports itself drained while transactions are in flight.
    DrainedWithOpenShares: Finder::ClusterSimulation,
    /// A node whose SSD is unusable reports that it holds no contexts.
    DrainedWithUnusableSsd: Finder::ClusterSimulation,
    /// A draining node accepts new contexts.
    DrainingNodeAcceptsKeeps: Finder::ClusterSimulation,
    /// A draining node accepts new transactions.
    DrainingNodeAcceptsWork: Finder::ClusterSimulation,
    /// An aborted share frees its slots before its engine has released them.
    EngineReleaseNotAwaited: Finder::ClusterSimulation,
    /// An aborted source share frees its slots while a fetch still reads them.
    FetchSourceNotPinned: Finder::ClusterSimulation,
    /// A node forgets a share as soon as the share ends.
    EndedShareForgotten: Finder::ClusterSimulation,
    /// A node frees a slot without telling the readers of its generation.
    FreedSlotNotReported: Finder::ClusterSimulation,
    /// Recovery keeps the first extent that it finds of a block, not the newest.
    RecoveryKeepsFirstExtent: Finder::ClusterSimulation,
    /// A report of a corrupt slot drops a later block that uses the slot now.
    CorruptReportGenerationIgnored: Finder::ClusterSimulation,
    /// A node does not pin an ephemeral object, and identifies it by its slot alone.
    EphemeralObjectNotPinned: Finder::ClusterSimulation,
    /// A client reads an unpinned object without checking that it is still current.
    UnpinnedReadNotChecked: Finder::ClusterSimulation,
    /// A slot keeps its generation when it is freed and used again.
    SlotGenerationNotAdvanced: Finder::ClusterSimulation,
    /// The uncommitted objects of a dead client are committed.
    PartialPutCommitted: Finder::ClusterSimulation,
    /// The log reports an append as durable before the sync.
    AppendReportedBeforeSync: Finder::ClusterSimulation,
    /// A context expires 50 s too early.
    ContextExpiresEarly: Finder::ClusterSimulation,
    /// The SSD evicts an unexpired context to make room.
    ContextEvicted: Finder::ClusterSimulation,
    /// An ephemeral object that a tenant has kept since is removed with its client.
    KeptObjectRemovedWithClient: Finder::ClusterSimulation,
    /// A lookup in memory finds a block that follows another parent.
    ParentIgnored: Finder::ClusterSimulation,
    /// A lookup on the SSD finds a block that follows another parent.
    SsdParentIgnored: Finder::ClusterSimulation,
    /// A node frees the slot of a late SSD read while the read may still write to it.
    LateSsdReadNotAwaited: Finder::ClusterSimulation,
    /// A share is not told that its late writer was cut off.
    CutWriterNotReported: Finder::ClusterSimulation,
    /// A renewed lease never expires.
    RenewedLeaseNeverExpires: Finder::ClusterSimulation,
    /// The lease that expires last is checked first.
    LeaseOrderReversed: Finder::ClusterSimulation,
    /// A block is evicted before its children, and no assertion notices.
    ParentEvictedFirst: Finder::ClusterSimulation,
    /// The log gives up an extent that cleared a mark while an older extent has the mark.
    ClearedMarkReturns: Finder::ClusterSimulation,
    /// A block that is removed while cleaning moves its extent is found again.
    RemovedBlockReturnsAfterCleaning: Finder::ClusterSimulation,
    /// A lookup in memory finds a block of another namespace.
    NamespaceIgnored: Finder::ClusterSimulation,
    /// A lookup in memory finds an object of another namespace.
    ObjectNamespaceIgnored: Finder::ClusterSimulation,
    /// A lookup on the SSD finds, and a read returns, a block of another namespace.
    SsdNamespaceIgnored: Finder::ClusterSimulation,
    /// A full segment whose last use was a read gets no footer and is never cleaned.
    FooterOmittedAfterRead: Finder::ClusterSimulation,
    /// The end of a client removes an object that another client has put under its key since.
    ReplacedObjectRemovedWithClient: Finder::ClusterSimulation,
    /// A share frees its immediate and tail space while its remote writer may still write.
    ShareEndsBeforeWriter: Finder::ClusterSimulation,
    /// A node returns a computed page to the engine while a copy still reads it.
    PoolPageReturnedDuringCopy: Finder::ClusterSimulation,
    /// A fetch counts pages as good that the receiver rejected as corrupt.
    CorruptPageCountedGood: Finder::ClusterSimulation,
    /// The pins of a dead client are never released.
    DeadClientPinsLeaked: Finder::ClusterSimulation,
    /// A stopped push ends while its writes are in flight and their outcome is unknown.
    StoppedPushEndsEarly: Finder::ClusterSimulation,
    /// A share frees its slots while a push still reads them.
    PushSourceNotPinned: Finder::ClusterSimulation,
    /// After recovery, an old version in a lower tier replaces an object put before it.
    PutBeforeRecoveryForgotten: Finder::ClusterSimulation,
    /// The reserved slots of a dead client are held until the lease expires.
    DeadClientPutNotReleased: Finder::ClusterSimulation,
    /// An aborted share frees its slots while its remote writer may still write to them.
    QuarantineOmitted: Finder::ClusterSimulation,
    /// The log gives up a tombstone while an older extent of its block may still be found.
    RemovalTombstoneDropped: Finder::ClusterSimulation,
    /// The log writes no tombstone for a removed object, so recovery finds it again.
    RemovalRecordOmitted: Finder::ClusterSimulation,
    /// After a partial recovery, the log writes no tombstone for an unknown object.
    RemovalOmittedAfterPartialRecovery: Finder::ClusterSimulation,
    /// A fetch is settled with fewer pages while its source may still write.
    FetchSettledWhileWriting: Finder::ClusterSimulation,
    /// A push that was stopped before its start starts when its targets arrive.
    StoppedPushStarts: Finder::ClusterSimulation,
    /// An abort that arrives before its allocation leaves no tombstone.
    TombstoneOmitted: Finder::ClusterSimulation,
    /// A corrupt block is dropped without its children, and no assertion notices.
    CorruptBlockLeavesChildren: Finder::ClusterSimulation,
    /// An aborted share does not ask its remote writer to stop.
    WriterStopNotRequested: Finder::ClusterSimulation,
    // The transfer engine: `kvasir-transfer-core`, `kvasir-transfer`, `kvasir-transfer-verbs`.
    /// A close request omits the acknowledged counts, so the receiver discards them too.
    AcknowledgedCountsOmitted: Finder::FailoverSimulation,
    /// A session keeps the answers of all its closed paths.
    AnswersUnbounded: Finder::Tests("-p kvasir-transfer-core --lib the_answers_that_a_session_keeps"),
    /// Answers to a sender that does not read them are queued without a limit.
    AnswerQueueUnbounded: Finder::Tests("-p kvasir-transfer --lib asks_and_does_not_listen"),
    /// One turn reads all datagrams of a receiver that never stops sending.
    AnswerReadsUnbounded: Finder::Tests("-p kvasir-transfer --lib always_has_more_to_tell"),
    /// A write beyond the end of its region is accepted.
    BoundsNotChecked: Finder::Tests("-p kvasir-transfer --test contract what_may_not_be_written"),
    /// A path that worked is avoided after its first failure.
    BrokenPathAvoidedAtOnce: Finder::Tests("-p kvasir-transfer-core --lib avoid"),
    /// A path that comes up and fails again and again is not avoided.
    BrokenPathNotAvoided: Finder::Tests("-p kvasir-transfer --test parts avoided"),
    /// The engine accepts messages although the application holds every buffer.
    MessageBuffersUnbounded: Finder::Tests("-p kvasir-transfer --test contract while_the_application_holds"),
    /// The caller is told that signals were sent, although arrivals are counted instead.
    CountingFallbackNotReported: Finder::Tests("-p kvasir-transfer-core --test signalled"),
    /// A write with a wrong checksum is counted.
    ChecksumsNotVerified: Finder::Tests("-p kvasir-transfer --test contract sim::a_long_write_with_wrong_bytes"),
    /// A sender without the cookie of the receiver's endpoint is admitted.
    CookieNotChecked: Finder::Tests("-p kvasir-transfer --test parts hostile"),
    /// A shm sender checks its permission to copy before its epoch is visible.
    CopyNotAnnouncedFirst: Finder::Tests("-p kvasir-transfer --test models copying"),
    /// A write is counted before its last byte has landed.
    CountBeforeLastByte: Finder::FailoverSimulation,
    /// The eviction of an early counter also drops the counts of other peers.
    CountsOfOthersForgotten: Finder::Tests("-p kvasir-transfer-core --lib who_loses"),
    /// A cut-off does not close the open paths of the sender.
    CutOffLeavesPathsOpen: Finder::FailoverSimulation,
    /// A sender that has not learned of its cut-off is admitted again.
    CutOffIgnoredOnReconnect: Finder::Tests("-p kvasir-transfer --test contract a_cut_off_holds"),
    /// A cut-off is confirmed while a shm sender still copies.
    CutOffIgnoresCopies: Finder::Tests("-p kvasir-transfer --test parts shm_hostile"),
    /// A copy counts as running although the process of its sender has exited.
    DeadWriterWaitedFor: Finder::Tests("-p kvasir-transfer --lib a_copy_is_over"),
    /// An operation does not end at its deadline.
    DeadlinesIgnored: Finder::FailoverSimulation,
    /// An answer repeats a message id that its close request repeats.
    DeliveredNotDeduplicated: Finder::Tests("-p kvasir-transfer-core --lib the_answers_that_a_session_keeps"),
    /// A shm sender still finds a revoked region in the directory.
    DirectoryKeepsRevoked: Finder::Tests("-p kvasir-transfer --test contract shm::nothing_lands_after_a_revocation"),
    /// The writes of an immediate that has reached its count are sent again.
    DiscardAfterReached: Finder::FailoverSimulation,
    /// The receiver keeps the counts of a failed path although their writes are sent again.
    DiscardOmitted: Finder::FailoverSimulation,
    /// A group counts as drained while frames of it are in flight.
    DrainedTooEarly: Finder::FailoverSimulation,
    /// The oldest early counter is evicted although its peer is within its share.
    EarlyCountsEvictedByAge: Finder::Tests("-p kvasir-transfer-core --lib early_counts"),
    /// On an unordered network the last piece of a write carries its count.
    EfaCountWithLastPiece: Finder::Tests("-p kvasir-transfer --test parts -- --exact efa::a_write_of_many_posts_is_counted_only_after_the_last_byte"),
    /// A revocation over EFA does not wait until in-flight writes have landed.
    EfaRevocationDoesNotWait: Finder::Tests("-p kvasir-transfer --lib whoever_ends_a_registration"),
    /// A session whose queued operations have all ended is not idle.
    EndedOperationKeepsSessionBusy: Finder::Tests("-p kvasir-transfer-core --test rails"),
    /// Ended operations stay in a queue that no path reads.
    EndedOperationsNotSwept: Finder::Tests("-p kvasir-transfer-core --lib a_sender_takes_out"),
    /// The counts of a path that ended by itself are final before the sender asks for them.
    EndedPathClosedAtOnce: Finder::FailoverSimulation,
    /// The engine opens more connections than `connections_max`.
    EndpointPoolUnbounded: Finder::Tests("-p kvasir-transfer --test parts crowd"),
    /// A path is avoided because the peer closed a connection that had been useful.
    PathAvoidedAfterPeerClose: Finder::Tests("-p kvasir-transfer --lib of_no_use"),
    /// An expectation outlives its deadline.
    ExpectationsNotExpired: Finder::Tests("-p kvasir-transfer --test contract shm::an_expectation_ends"),
    /// A path that failed is avoided forever.
    FailedPathNeverRetried: Finder::Tests("-p kvasir-transfer-core --lib avoid"),
    /// A path that failed is tried first again.
    FailedPathNotAvoided: Finder::Tests("-p kvasir-transfer --test parts avoided"),
    /// A write uses distant network cards although near ones are up.
    CardDistanceIgnored: Finder::Tests("-p kvasir-transfer-core --test rails"),
    /// The region of the first put alone decides the path of all puts and signals.
    FirstPutChoosesPath: Finder::Tests("-p kvasir-transfer-core --test signalled"),
    /// No signal carries a fence.
    SignalFenceOmitted: Finder::Tests("-p kvasir-transfer-core"),
    /// The pause of a flapping path never returns to its minimum.
    FlappingPathNeverForgiven: Finder::Tests("-p kvasir-transfer-core --lib avoid"),
    /// A path that works only for a moment each time is retried at once.
    FlappingPathNotPaused: Finder::Tests("-p kvasir-transfer --lib a_way_that_is_of_use"),
    /// A hello that is signed with any key is accepted for any incarnation.
    IdentityNotChecked: Finder::Tests("-p kvasir-transfer --lib in_the_name_of_another_one"),
    /// Cancelling an immediate forgets its counts, and its landed writes are sent again.
    CancelledCountsForgotten: Finder::FailoverSimulation,
    /// Every slice of a split write carries the immediate.
    ImmOnSlices: Finder::FailoverSimulation,
    /// A write to a region of an earlier incarnation is accepted.
    IncarnationNotChecked: Finder::Tests("-p kvasir-transfer --test contract what_may_not_be_written"),
    /// A write with an unknown key lands in another region.
    KeyNotChecked: Finder::Tests("-p kvasir-transfer --test contract what_may_not_be_written"),
    /// A path is avoided although known refusals explain the end of its connection.
    PathAvoidedAfterKnownRefusals: Finder::Tests("-p kvasir-transfer --lib whatever_comes_first"),
    /// Sessions without a connection are kept without a limit on their memory.
    DisconnectedSessionsUnbounded: Finder::Tests("-p kvasir-transfer-core --lib what_peers_leave_behind"),
    /// A queue that was seen empty earlier frees the room of queue pairs destroyed since then.
    RoomFreedByOldObservation: Finder::Tests("-p kvasir-transfer --test models room_is_given_back"),
    /// An operation that leaves the pinned path is not offered to the other paths.
    UnpinnedOperationNotOffered: Finder::Tests("-p kvasir-transfer-core --test signalled"),
    /// A new region's length is visible before the former key is withdrawn.
    RegionLengthPublishedEarly: Finder::Tests("-p kvasir-transfer --test models another_region"),
    /// Shared memory can shrink while other processes map it.
    MemoryNotSealed: Finder::Tests("-p kvasir-transfer --test parts memory::"),
    /// The receiver does not remember the delivered messages.
    MessageDeliveredTwice: Finder::FailoverSimulation,
    /// The receiver answers about a path while frames of that path can still land.
    NoDrainBeforeDiscard: Finder::FailoverSimulation,
    /// The sender opens no other path for a region that none of the session's cards carries.
    NoPathForUncarriedRegion: Finder::Tests("-p kvasir-transfer --test parts efa"),
    /// After an outage, the sender opens no path that can order already promised signals.
    NoPathForPromisedSignals: Finder::Tests("-p kvasir-transfer --lib after_an_outage"),
    /// The receiver admits a writer that shows no certificate.
    WriterCertificateNotRequired: Finder::Tests("-p kvasir-transfer --test parts tls"),
    /// When the list of uncarried regions is full, the sender drops the newest one, not the oldest.
    NewestRegionForgottenFirst: Finder::Tests("-p kvasir-transfer-core --lib of_too_many_regions"),
    /// The engine admits more operations than its limit.
    OperationsUnbounded: Finder::Tests("-p kvasir-transfer --test contract a_full_queue"),
    /// After other writes had a turn, puts and signals wait until no other write is queued.
    OtherWritesBeforePuts: Finder::Tests("-p kvasir-transfer-core --test signalled"),
    /// Puts behind a put that leaves its path for another one leave that path too.
    LaterPutsLeaveToo: Finder::Tests("-p kvasir-transfer-core --test signalled"),
    /// A thread that waits for an outcome does not announce that it sleeps, and is not woken.
    OutcomeWaiterNotWoken: Finder::Tests("-p kvasir-transfer --test models ends"),
    /// The end of a part becomes visible before the part's bytes.
    PartVisibleBeforeItsBytes: Finder::Tests("-p kvasir-transfer --test models ends"),
    /// When the count history is full, the maker that adds a count loses a path, even if it has few counts.
    PathForgotten: Finder::Tests("-p kvasir-transfer-core --lib who_fills"),
    /// Puts and signals of one peer take different queue pairs.
    PeerOnTwoQueuePairs: Finder::FailoverSimulation,
    /// A put of one peer delays the signals of another peer of the same call.
    PeersWaitForEachOther: Finder::Tests("-p kvasir-transfer-core --test signalled"),
    /// A put-with-signal begins no transfer until each of its peers has a path.
    BatchWaitsForLastPeer: Finder::Tests("-p kvasir-transfer-core --test signalled"),
    /// The sender treats frames of a failed path as ordered before frames on the next path.
    OrderKeptAfterFailover: Finder::FailoverSimulation,
    /// A put that left the ordered queue for another path counts as ordered on that path.
    OrderAssumedOnOtherPath: Finder::Tests("-p kvasir-transfer-core --test signalled"),
    /// A resent frame counts as ordered, whichever path carries it.
    OrderAssumedOnResend: Finder::FailoverSimulation,
    /// Other writes of a session wait until no put or signal is queued.
    PutsBeforeAllOtherWrites: Finder::Tests("-p kvasir-transfer-core --test signalled"),
    /// Puts and signals stay on a path that does not carry them.
    PutsStayOnUnsuitablePath: Finder::Tests("-p kvasir-transfer-core --test signalled"),
    /// The receiver reads one sender's questions for as long as more arrive.
    QuestionReadsUnbounded: Finder::Tests("-p kvasir-transfer --lib always_has_more_to_ask"),
    /// When a path does not carry one region, the sender closes it for all other regions too.
    RailNotUsedForOtherRegions: Finder::Tests("-p kvasir-transfer --test parts efa"),
    /// A cancelled expectation stays, and can still be reached.
    ReachedAfterCancel: Finder::FailoverSimulation,
    /// When the receiver removes a counter, it forgets the counts of paths that are still open.
    FormerCountsForgotten: Finder::FailoverSimulation,
    /// A ring record becomes visible before its bytes.
    RecordVisibleBeforeItsBytes: Finder::Tests("-p kvasir-transfer --test models records"),
    /// The sender avoids a path because peers refused writes that used it.
    RefusalsBlamedOnPath: Finder::Tests("-p kvasir-transfer --lib whatever_comes_first"),
    /// A revoked region can still be found by its key.
    RevokedRegionStillFound: Finder::Tests("-p kvasir-transfer --test contract tcp::nothing_lands_after_a_revocation"),
    /// The sender keeps putting writes to a region on a path that does not carry it.
    RegionRetriedOnSameRail: Finder::Tests("-p kvasir-transfer-core --test rails"),
    /// The sender resends the frames of a failed path before the receiver has closed that path.
    ResendBeforePathClosed: Finder::FailoverSimulation,
    /// The sender treats frames that did not land as landed.
    ResendLeftOut: Finder::FailoverSimulation,
    /// The sender resends frames of an operation that has ended.
    EndedOperationResent: Finder::FailoverSimulation,
    /// The last read of a ring continues for as long as its sender pushes.
    LastRingReadUnbounded: Finder::Tests("-p kvasir-transfer --lib read_for_the_last_time"),
    /// A revoked region still accepts writes.
    RevocationLeftOut: Finder::FailoverSimulation,
    /// A revocation waits for copies of writers that never had the region.
    RevocationWaitsForEveryCopy: Finder::Tests("-p kvasir-transfer --test parts stands_still_in_a_copy"),
    /// A revocation is confirmed while a shm sender still copies.
    RevocationWaitsForNoCopy: Finder::Tests("-p kvasir-transfer --test contract shm::a_revocation_waits"),
    /// The engine keeps the card pairs of a session that never started.
    RoutesKeptWithoutSession: Finder::Tests("-p kvasir-transfer --lib routes_are_kept"),
    /// The sender seals a split write when its first slice has landed.
    SealBeforeAllSlices: Finder::FailoverSimulation,
    /// A signal at the head of its queue waits for its put's seal, even if the seal needs another path.
    SealBlocksSignals: Finder::Tests("-p kvasir-transfer-core --test signalled"),
    /// A path seals a write although a slice used another path, which reorders.
    SealedByAnotherPath: Finder::Tests("-p kvasir-transfer-core --test rails"),
    /// The sender splits a write that exactly fits one slice.
    ShortWriteIsSplit: Finder::Tests("-p kvasir-transfer-core"),
    /// After one other write, however short, a full slice of puts passes.
    ShortWriteCostsASlice: Finder::Tests("-p kvasir-transfer-core --test signalled"),
    /// The sender sends a signal although a put of its transfer was refused.
    SignalAfterFailedPut: Finder::FailoverSimulation,
    /// A signal that left the ordered queue does not wait until its puts have landed.
    UnorderedSignalBeforeItsPuts: Finder::Tests("-p kvasir-transfer-core --test signalled"),
    /// A signal does not wait for its puts.
    SignalBeforeItsPuts: Finder::FailoverSimulation,
    /// A drain does not cancel transfers of its group that have not begun.
    BatchNotCancelledByDrain: Finder::FailoverSimulation,
    /// A queued signal stays on a path whose acknowledgements do not confirm placement in memory.
    SignalStaysWithoutPlacement: Finder::Tests("-p kvasir-transfer-core --test signalled"),
    /// A signal uses a path whose acknowledgements do not confirm placement in memory.
    SignalWithoutPlacement: Finder::Tests("-p kvasir-transfer-core --test signalled"),
    /// An engine that has the cookie can connect in the name of another engine.
    SignatureNotChecked: Finder::Tests("-p kvasir-transfer --lib in_the_name_of_another_one"),
    /// The sender never gives up a silent path that owes it an answer.
    SilentPathKept: Finder::Tests("-p kvasir-transfer-core"),
    /// A thread that goes to sleep looks for work before its flag is visible.
    SleeperNotSeen: Finder::Tests("-p kvasir-transfer --test models waking"),
    /// One path takes all slices of a write.
    SlicesNotSpread: Finder::Tests("-p kvasir-transfer-core --test rails"),
    /// Any number of connections can stay open without a hello until they time out.
    StrangersUnbounded: Finder::Tests("-p kvasir-transfer --test parts too_many_strangers"),
    /// A connection without a hello evicts an idle peer.
    StrangersEvictPeers: Finder::Tests("-p kvasir-transfer --test parts strangers_take"),
    /// The rest of a TCP payload is written into a region that was revoked meanwhile.
    TcpPayloadOutlivesRevocation: Finder::Tests("-p kvasir-transfer --test contract tcp::a_revocation_waits"),
    /// An operation that has ended does not wait for its undecided frames.
    UndecidedFramesForgotten: Finder::FailoverSimulation,
    /// If one side has more cards, its extra cards get no pair.
    ExtraCardsLeftOut: Finder::Tests("-p kvasir-transfer --lib topology"),
    /// The oldest endpoint is evicted although it was used recently.
    UsedEndpointEvicted: Finder::Tests("-p kvasir-transfer-core --lib sieve"),
    /// The receiver computes a second answer when a sender repeats a question about a path.
    VerdictNotRemembered: Finder::FailoverSimulation,
    /// Frames that wait for a region stay queued for a rail that does not carry it.
    WaitingNotRequeued: Finder::Tests("-p kvasir-transfer-core --test rails"),
    /// A task that finds no outcome is not woken when the outcome is set.
    WakerNotKept: Finder::Tests("-p kvasir-transfer --test models ends"),
    /// The worker itself waits until the system has resolved the address of a card.
    WorkerBlocksOnAddressLookup: Finder::VirtualMachine("nobody_waits"),
    /// A submission ends while one of its parts has not ended.
    JoinEndsBeforeItsParts: Finder::Tests("-p kvasir-transfer --test models ends"),
    /// A worn-out path is given up although its session is idle and needs no other path.
    WornPathEndsIdleSession: Finder::Tests("-p kvasir-transfer-core --test failover"),
    /// A write waits for a near path although other paths are up.
    WriteWaitsForNearRail: Finder::Tests("-p kvasir-transfer-core --test rails"),
}
