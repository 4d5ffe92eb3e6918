//! What a pool does about locks that are nested in opposite orders.

use std::env::{self, VarError};

use crate::base::error::{ErrorKind, LockError};

/// What a pool does about locks that are nested in opposite orders, set by
/// [`PoolBuilder::lock_order`](crate::PoolBuilder::lock_order).
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockOrder {
    /// It does not check the order.
    Off,
    /// It emits an event, and adds the call to [`lock_order_inversions`](crate::lock_order_inversions).
    Warn,
    /// The same, and then the call panics before it requests its lock. It panics each time, even if a pool with the same
    /// name has reported the inversion before. For tests.
    Panic,
}

impl LockOrder {
    /// The value of `LOCK_ORDER`. Without one, [`Warn`](Self::Warn) in a build with debug assertions, else
    /// [`Off`](Self::Off).
    pub(crate) fn of_process() -> Result<Self, LockError> {
        Self::of_variable(env::var("LOCK_ORDER"))
    }

    fn of_variable(value: Result<String, VarError>) -> Result<Self, LockError> {
        const DEFAULT: LockOrder =
            if cfg!(debug_assertions) { LockOrder::Warn } else { LockOrder::Off };
        let value = match value {
            Ok(value) => value,
            Err(VarError::NotPresent) => return Ok(DEFAULT),
            Err(VarError::NotUnicode(value)) => value.to_string_lossy().into_owned(),
        };
        match value.as_str() {
            "" => Ok(DEFAULT),
            "off" => Ok(Self::Off),
            "warn" => Ok(Self::Warn),
            "panic" => Ok(Self::Panic),
            _ => Err(invalid(&value)),
        }
    }
}

#[cold]
fn invalid(value: &str) -> LockError {
    let cause = format!("the environment variable LOCK_ORDER has the value `{value}`");
    LockError::new(ErrorKind::Config, cause).remedy("write `off`, `warn` or `panic`")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_is_read() {
        let of = |value: &str| LockOrder::of_variable(Ok(value.to_owned()));
        let unset = LockOrder::of_variable(Err(VarError::NotPresent)).unwrap();
        assert_eq!(unset, if cfg!(debug_assertions) { LockOrder::Warn } else { LockOrder::Off });
        assert_eq!(of("").unwrap(), unset);
        for (value, order) in
            [("off", LockOrder::Off), ("warn", LockOrder::Warn), ("panic", LockOrder::Panic)]
        {
            assert_eq!(of(value).unwrap(), order);
        }
        let error = of("on").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains("LOCK_ORDER has the value `on`; write"), "{error}");
    }
}
