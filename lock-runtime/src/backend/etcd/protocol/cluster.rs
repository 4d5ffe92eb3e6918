//! Log-in, and the state of the cluster.

use crate::backend::etcd::protocol::protobuf::{MalformedMessage, MessageWriter, each_field};

pub(crate) fn log_in(user: &str, password: &str) -> Vec<u8> {
    let mut writer = MessageWriter::default();
    writer.bytes(1, user.as_bytes());
    writer.bytes(2, password.as_bytes());
    writer.into_bytes()
}

/// The token of a log-in.
pub(crate) fn token(message: &[u8]) -> Result<String, MalformedMessage> {
    let mut token = String::new();
    each_field(message, |field, value| {
        if field == 2 {
            token = value.text()?;
        }
        Ok(())
    })?;
    Ok(token)
}

/// What a member says about itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct MemberStatus {
    pub(crate) version: String,
    pub(crate) is_learner: bool,
}

impl MemberStatus {
    pub(crate) fn read(message: &[u8]) -> Result<Self, MalformedMessage> {
        let mut status = Self::default();
        each_field(message, |field, value| {
            match field {
                2 => status.version = value.text()?,
                10 => status.is_learner = value.flag()?,
                _ => {}
            }
            Ok(())
        })?;
        Ok(status)
    }
}

/// A problem that stops a part of the service until an operator removes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AlarmKind {
    NoSpace,
    Corrupt,
}

pub(crate) fn alarms(message: &[u8]) -> Result<Vec<AlarmKind>, MalformedMessage> {
    let mut alarms = Vec::new();
    each_field(message, |field, value| {
        if field == 2 {
            each_field(value.bytes()?, |field, value| {
                match (field, value.int()?) {
                    (2, 1) => alarms.push(AlarmKind::NoSpace),
                    (2, 2) => alarms.push(AlarmKind::Corrupt),
                    _ => {}
                }
                Ok(())
            })?;
        }
        Ok(())
    })?;
    Ok(alarms)
}

/// How many members vote.
pub(crate) fn voters(message: &[u8]) -> Result<usize, MalformedMessage> {
    let mut voters = 0;
    each_field(message, |field, value| {
        if field == 2 {
            let mut is_learner = false;
            each_field(value.bytes()?, |field, value| {
                if field == 5 {
                    is_learner = value.flag()?;
                }
                Ok(())
            })?;
            voters += usize::from(!is_learner);
        }
        Ok(())
    })?;
    Ok(voters)
}
