//! Error codes of the protocol.

/// The code in a server's answer, if it is an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ServerCode(i32);

impl ServerCode {
    /// An entry of a transaction that failed because of another entry.
    pub(crate) const INCONSISTENT: Self = Self(-2);
    pub(crate) const CONNECTION_LOSS: Self = Self(-4);
    pub(crate) const UNIMPLEMENTED: Self = Self(-6);
    pub(crate) const OPERATION_TIMEOUT: Self = Self(-7);
    pub(crate) const NO_NODE: Self = Self(-101);
    pub(crate) const NO_AUTH: Self = Self(-102);
    pub(crate) const PARENT_IS_EPHEMERAL: Self = Self(-108);
    pub(crate) const NODE_EXISTS: Self = Self(-110);
    pub(crate) const SESSION_EXPIRED: Self = Self(-112);
    pub(crate) const INVALID_ACL: Self = Self(-114);
    pub(crate) const AUTH_FAILED: Self = Self(-115);
    pub(crate) const SESSION_MOVED: Self = Self(-118);
    pub(crate) const READ_ONLY: Self = Self(-119);
    pub(crate) const QUOTA_EXCEEDED: Self = Self(-125);
    pub(crate) const THROTTLED: Self = Self(-127);

    /// `Err` with the code unless it is zero.
    pub(crate) const fn check(code: i32) -> Result<(), Self> {
        if code == 0 { Ok(()) } else { Err(Self(code)) }
    }

    pub(crate) const fn number(self) -> i32 {
        self.0
    }
}
