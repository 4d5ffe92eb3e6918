-- One node of a quorum: it votes for an owner by storing the locks, and keeps a ballot log with the numbers of each.
-- quorum/mod.rs describes the protocol. The reply is described at each operation. KEYS the locks; and with ballot
-- numbers, the node's ballot log ARGV[1] operation: propose, extend, keep, release, release at expiry, or withdraw; [2]
-- token; [3] lease time of the locks in ms; [4] number of locks; [5] first and [6] last number of the block, or 0; [7]
-- maximum number of log entries; [8] maximum if entries of locks that are not held are among them, or [7]

-- State after each operation, for a block of numbers first..last (without one there is no log, and the value of a lock
-- is the token alone):
--
--   after                    the lock                promised              accepted
--   a vote                   token#first#before      last                  last; `before` is the previous one
--   its withdrawal           gone                    above last            before
--   a withdrawal elsewhere   as it was               above last            as it was
--   a release                gone, or ~its value     above last            above last
--   a renewal that finds     token#first#before      as it was, or last    last
--     nothing in the lock
--
-- Promised: no number up to this one is accepted. Accepted: the greatest accepted number, which may have been
-- granted; it blocks renewals of older grants. It has a separate entry only where it is less than the promised
-- number, that is, where proposals did not lead to a grant.

-- A full log removes the entries with the smallest numbers. The floor replaces them: no removed entry was
-- above it. So the number that applies to a lock never decreases, whatever clocks do.
local MAX_ENTRIES = tonumber(ARGV[7])
-- A log with more entries than this removes those of locks that are not held first. For them the floor is as good as
-- an entry; the entry of a held lock says whether a renewal may restore the lock.
local MAX_UNHELD = tonumber(ARGV[8] or ARGV[7])
-- How many entries are checked for one that is added.
local CHECKED = 32
-- The log entry of the floor: no lock has an empty key.
local FLOOR = ''
-- Prefix of a key in the separate entry of its accepted number: no key contains this byte.
local ACCEPTED = '\255'
-- Microseconds that a number may be ahead of this node's clock: otherwise one client could lock out all others.
local AHEAD = 60000000
-- Prefix of the value of a lock that was released and stays taken for a while: no token starts with it.
local KEPT = '~'

local token, ttl, locks = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local first, last = tonumber(ARGV[5]), tonumber(ARGV[6])
local log = KEYS[locks + 1]
local whole = function(number) return string.format('%.0f', number) end

-- Both return text.
local function promised_for(lock)
  return redis.call('ZSCORE', log, lock) or redis.call('ZSCORE', log, FLOOR) or '0'
end
local function accepted_for(lock, otherwise)
  return redis.call('ZSCORE', log, ACCEPTED .. lock) or otherwise
end

local function is_held(entry)
  local lock = string.gsub(entry, '^' .. ACCEPTED, '')
  for i = 1, locks do
    if KEYS[i] == lock then return true end
  end
  -- A key that may not be read here counts as free. So does a key in a slot that is moving to another server.
  local left = redis.pcall('PTTL', lock)
  return type(left) == 'number' and left ~= -2
end

local function remove_unheld(over)
  local least, floor = redis.call('ZRANGE', log, 0, CHECKED - 1, 'WITHSCORES'), nil
  for at = 1, #least, 2 do
    if over <= 0 then break end
    local entry = least[at]
    if entry ~= FLOOR and not is_held(entry) then
      redis.call('ZREM', log, entry)
      floor, over = least[at + 1], over - 1
    end
  end
  if floor then redis.call('ZADD', log, 'GT', floor, FLOOR) end
end

local function put(...)
  if redis.call('ZADD', log, ...) == 0 then return end
  if MAX_UNHELD < MAX_ENTRIES then
    local over = redis.call('ZCARD', log) - MAX_UNHELD
    if over > 0 then remove_unheld(over) end
  end
  while redis.call('ZCARD', log) > MAX_ENTRIES do
    -- The floor, if it exists, and the entry with the smallest number; or two entries that are
    -- below the floor, which stays.
    local least = redis.call('ZPOPMIN', log, 2)
    redis.call('ZADD', log, 'GT', least[4], FLOOR)
  end
end

local function note(lock, promised, accepted)
  if accepted < promised then
    put(whole(promised), lock, whole(accepted), ACCEPTED .. lock)
  else
    put(whole(promised), lock)
    redis.call('ZREM', log, ACCEPTED .. lock)
  end
end

local function clock()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

-- With a ballot number, the prefix of the value of its vote.
local own = first > 0 and token .. '#' .. ARGV[5] .. '#'
local function value(before) return own and own .. before or token end
-- Never shortens the lease: this may be a late request with a shorter lease time.
local function left_or_ttl(lock) return math.max(ttl, redis.call('PTTL', lock)) end
-- The `before` of a vote with a ballot number, of any owner.
local function before_of(held) return string.match(held, '^%x+/%x+#%d+#(%d+)$') end
-- A token is an owner and an attempt, or the owner alone for any of its attempts. It is no prefix of a token of another
-- owner or attempt.
local function starts_with(text, with) return string.sub(text, 1, #with) == with end

if ARGV[1] == 'propose' then
  -- Reply {1} if the locks have the token for the whole ttl; {0, ms until the holder's lease expires or -1 if
  -- unknown, the holder} if another owner holds one; {2, promised number} if that is not below the proposed one;
  -- {3, the node's clock} if the proposed one is too far ahead of it. Without {1} nothing was changed.
  local again, expires_in, holder, before, lease = own, 0, nil, {}, {}
  for i = 1, locks do
    local held = redis.call('GET', KEYS[i])
    if held and not starts_with(held, token) then
      local left = redis.call('PTTL', KEYS[i])
      if left < 0 or expires_in < 0 then expires_in = -1 else expires_in = math.max(expires_in, left, 1) end
      holder = held
    end
    -- A repeated proposal of a stored vote: recognised by the number in the value, not by the log.
    again = again and held and starts_with(held, own)
    -- The vote of an earlier round keeps its `before`: its own number belongs to no other owner.
    before[i] = held and before_of(held)
    lease[i] = held and left_or_ttl(KEYS[i]) or ttl
  end
  if holder then return {0, expires_in, holder} end
  if own and not again then
    local most, apart = 0, {}
    for i = 1, locks do
      local promised = promised_for(KEYS[i])
      local accepted = accepted_for(KEYS[i], promised)
      before[i], apart[i] = before[i] or accepted, accepted ~= promised
      most = math.max(most, tonumber(promised))
    end
    if first <= most then return {2, whole(most)} end
    local now = clock()
    if last > now + AHEAD then return {3, whole(now)} end
    for i = 1, locks do
      put(ARGV[6], KEYS[i])
      if apart[i] then redis.call('ZREM', log, ACCEPTED .. KEYS[i]) end
    end
  end
  for i = 1, locks do redis.call('SET', KEYS[i], value(before[i]), 'PX', lease[i]) end
  return {1}
end

if ARGV[1] == 'extend' or ARGV[1] == 'keep' then
  -- Extend restores a missing lock, keep does not.
  -- Reply 1 if the locks have the token for the whole ttl, 2 if so and one of them was missing, 0 if not.
  local missing = {}
  for i = 1, locks do
    local held = redis.pcall('GET', KEYS[i])
    if type(held) == 'table' then
      if not string.find(held.err, 'WRONGTYPE') then return held end
      return 0
    end
    if held and not starts_with(held, token) then return 0 end
    if not held then
      if ARGV[1] == 'keep' then return 0 end
      local promised = own and promised_for(KEYS[i]) or '0'
      local accepted = own and accepted_for(KEYS[i], promised) or '0'
      -- A greater number: another owner may have been granted the lock here since, and have released it; or this grant
      -- was released. With its own number, the node has only lost the lock.
      if tonumber(accepted) > last then return 0 end
      missing[i] = {promised = math.max(tonumber(promised), last), before = accepted}
    end
  end
  for i = 1, locks do
    local lost = missing[i]
    if lost then
      if own then note(KEYS[i], lost.promised, last) end
      redis.call('SET', KEYS[i], value(lost.before), 'PX', ttl)
    else
      redis.call('PEXPIRE', KEYS[i], left_or_ttl(KEYS[i]))
    end
    -- Writing a key ends its tracking, reading it starts it again.
    redis.call('GET', KEYS[i])
  end
  return next(missing) and 2 or 1
end

-- release: removes a vote that may have led to a grant. ARGV[3] is how long the locks stay taken, or 0
-- release at expiry: the locks stay taken until their leases expire
-- withdraw: removes a vote that did not lead to a grant, and will not
-- Reply 1 if all locks had the token, 0 if not. A later proposal of the same block is refused; after a
-- release, a later extension too.
local outcome, at_expiry = 1, ARGV[1] == 'release at expiry'
local was_granted = at_expiry or ARGV[1] == 'release'

local function note_end(lock, held)
  local promised = promised_for(lock)
  -- The usual case: the vote is stored, and nothing was promised since. Then nothing else was accepted.
  if was_granted and promised == ARGV[6] and held and starts_with(held, own) then
    return put(whole(last + 1), lock)
  end
  local has_token, before = held and starts_with(held, token), held and before_of(held)
  local above, accepted = last + 1, tonumber(accepted_for(lock, promised))
  if was_granted then
    accepted = math.max(accepted, above)
    -- The release must survive a withdrawal of the vote that is stored here.
    if before and not has_token and tonumber(before) <= last then
      redis.call('SET', lock, string.sub(held, 1, #held - #before) .. whole(above), 'KEEPTTL')
    end
  else
    -- A number further ahead was refused, and will be until the clock has passed it.
    above = math.min(above, clock() + AHEAD)
    if has_token and before then accepted = tonumber(before) end
  end
  note(lock, math.max(tonumber(promised), above), accepted)
end

for i = 1, locks do
  local held = redis.pcall('GET', KEYS[i])
  if type(held) == 'table' and not string.find(held.err, 'WRONGTYPE') then return held end
  if type(held) ~= 'string' then held = nil end
  if held and starts_with(held, token) then
    if at_expiry and redis.call('PTTL', KEYS[i]) >= 0 then
      redis.call('SET', KEYS[i], KEPT .. held, 'KEEPTTL')
    elseif ttl == 0 then
      redis.call('DEL', KEYS[i])
    -- The prefix hides the token from late requests. If memory is short, the lock is still freed in time.
    elseif type(redis.pcall('SET', KEYS[i], KEPT .. held, 'PX', ttl).err) == 'string' then
      redis.call('PEXPIRE', KEYS[i], ttl)
    end
  -- A repeated release has the same reply.
  elseif not held or not starts_with(held, KEPT .. token) then
    outcome = 0
  end
  -- The lock is freed even if no memory is left for the numbers.
  if own then pcall(note_end, KEYS[i], held) end
end
return outcome
