//! The rules of nodes and clients, each beside the wrong one; the faults; the bounds.

/// What a model is checked with.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// How many acquires there are, each with a token of its own.
    pub attempts: u8,
    /// How many rounds of proposals each may send.
    pub rounds: u8,
    /// How many renewals each may send.
    pub renewals: u8,
    /// The greatest number that is proposed as the first of a block.
    pub greatest: u8,
    /// How many numbers a grant has; the holder hands them on to others of its process.
    pub block: u8,
    pub low: Low,
    pub ttl: Ttl,
    pub retake: Retake,
    pub late_renewal: LateRenewal,
    pub token: Token,
    pub release: Release,
    pub withdrawal: Withdrawal,
    pub registers: Registers,
    pub faults: Faults,
    pub states: States,
}

/// States that differ only in what makes no difference to anything that may follow: in the order of nodes, and
/// in deadlines without a further effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum States {
    AreMerged,
    AreKeptApart,
}

/// A node that has accepted a number not below the proposed one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Low {
    ChangesNothing,
    /// Wrong: the next round is thought to be cheaper so.
    TakesTheKey,
}

/// A node that grants a token once more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ttl {
    IsSetAgain,
    /// Wrong: the client counts from its newest round.
    StaysAsItIs,
}

/// A renewal that finds no key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retake {
    /// Takes the key unless the node has accepted a number above its own: then the node has merely forgotten it.
    /// A release is noted as above the block, so that it counts as one.
    UnlessAbove,
    /// Takes the key if its number is above all that the node has accepted. So a key that a node forgets early
    /// stays away.
    Above,
    /// Wrong: takes it (`SET NX`).
    Always,
}

/// A renewal that gets its majority after the lease has run out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LateRenewal {
    CountsForNothing,
    /// The lease is valid again. The product does so in one case: a grant without a caller is requested again.
    IsCounted,
}

/// A token after its release was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Token {
    IsNotUsedAgain,
    /// Wrong.
    IsProposedAgain,
}

/// What a release leaves behind on a node, also where it finds no key of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// Proposals of the attempt that come later are refused.
    IsNoted,
    /// It frees, and that is all: the node has no memory left for the number.
    FreesOnly,
}

/// An end after which, for renewals of others, the attempt has never been on the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Withdrawal {
    OfWhatWasNotGranted,
    /// A failed proposal counts like a grant, and so blocks renewals.
    Never,
    /// Wrong: also of what was granted.
    OfAll,
}

/// How long a node keeps the greatest number it has accepted for the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Registers {
    Stay,
    /// Until some moment. Then a floor stands in for it, which no register that may be gone was above.
    GiveWayToFloor,
    /// Wrong: until some moment, and then it is 0.
    AreForgotten,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Faults {
    None,
    /// So many times a node's clock jumps, and the key expires early.
    ClockSteps(u8),
    /// So many times a node loses the key and what it has accepted.
    Losses(u8, Back),
}

/// When a node that has lost its data votes again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Back {
    AtOnce,
    /// With the greatest number that the others have accepted, but at any time.
    Seeded,
    /// After all that was sent before the loss is past its deadline.
    AfterTtl,
    /// Then, and with the greatest number that the others have accepted.
    AfterTtlSeeded,
    /// After a time in which all clocks have passed all that was proposed before the loss, and one ttl more.
    AfterClocksAndTtl,
}

impl Rules {
    /// The rules of the product: attempts, rounds each, first numbers up to.
    pub const fn of_product(attempts: u8, rounds: u8, greatest: u8) -> Self {
        Self {
            attempts,
            rounds,
            renewals: 0,
            greatest,
            block: 1,
            low: Low::ChangesNothing,
            ttl: Ttl::IsSetAgain,
            retake: Retake::UnlessAbove,
            late_renewal: LateRenewal::CountsForNothing,
            token: Token::IsNotUsedAgain,
            release: Release::IsNoted,
            withdrawal: Withdrawal::OfWhatWasNotGranted,
            registers: Registers::Stay,
            faults: Faults::None,
            states: States::AreMerged,
        }
    }

    /// The last number of the block that begins with `first`.
    pub const fn last(&self, first: u8) -> u8 {
        first + self.block - 1
    }
}
