-- One node's part in a quorum: it votes for an owner by taking the locks, and keeps a book of numbers for each.
-- quorum/mod.rs says what for.
-- KEYS the locks; and if there is a number, the node's book
-- ARGV[1] what to do: propose, extend, keep, release or withdraw; [2] token; [3] ms to keep the locks; [4] number
-- of locks; [5] first and [6] last number of the block, or 0; [7] how many entries the book may have

-- A full book forgets the entries with the least numbers, and its floor stands in for them: so what counts for a lock
-- never goes down, whatever clocks do.
local MOST = tonumber(ARGV[7])
-- The floor's place in the book: no lock has an empty key.
local FLOOR = ''
-- Before the key, the place of what was accepted, if less than was promised: no key has this byte.
local ACCEPTED = '\255'
-- Microseconds that a number may be ahead of this node's clock: else one client could shut all others out.
local AHEAD = 60000000

local token, ttl, locks = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local first, last = tonumber(ARGV[5]), tonumber(ARGV[6])
local book = KEYS[locks + 1]
local whole = function(number) return string.format('%.0f', number) end

-- Promised: no number up to it will be accepted. Accepted: the greatest that was, and may have been granted; what
-- was proposed and came to nothing is promised only. Both as text.
local function promised_for(lock)
  return redis.call('ZSCORE', book, lock) or redis.call('ZSCORE', book, FLOOR) or '0'
end
local function accepted_for(lock, promised)
  return redis.call('ZSCORE', book, ACCEPTED .. lock) or promised
end

local function put(...)
  if redis.call('ZADD', book, ...) == 0 then return end
  while redis.call('ZCARD', book) > MOST do
    -- The floor, if there is one yet, and the entry with the least number.
    local least = redis.call('ZPOPMIN', book, 2)
    redis.call('ZADD', book, least[4], FLOOR)
  end
end

local function note(lock, promised, accepted)
  if accepted < promised then
    put(whole(promised), lock, whole(accepted), ACCEPTED .. lock)
  else
    put(whole(promised), lock)
    redis.call('ZREM', book, ACCEPTED .. lock)
  end
end

-- A token is its owner and the attempt; the owner alone stands for whichever of its attempts. With a number, what
-- stands in a lock is the token, the number, and what had been accepted before.
local mine = first > 0 and token .. '#' .. ARGV[5] .. '#'
local function value(before) return mine and mine .. before or token end
local function before_of(held) return string.match(held, '#(%d+)$') end
local function begins(text, with) return string.sub(text, 1, #with) == with end

if ARGV[1] == 'propose' then
  -- Reply {1} if the locks are the token's for the whole ttl; {0, ms until the holder's time is over or -1 if
  -- unknown, the holder} if one is somebody else's; {2, number promised} if that is not below ours; {3, the
  -- node's clock} if ours is too far ahead of it. Then nothing was changed.
  local again, free_in, holder, before = first > 0, 0, nil, {}
  for i = 1, locks do
    local held = redis.call('GET', KEYS[i])
    if held and not begins(held, token) then
      local left = redis.call('PTTL', KEYS[i])
      if left < 0 or free_in < 0 then free_in = -1 else free_in = math.max(free_in, left, 1) end
      holder = held
    end
    -- Our own grant of this very number, asked for again: the number in the key says so, not the book.
    again = again and held and begins(held, mine)
    -- An earlier round of ours is nobody else's number.
    before[i] = held and before_of(held)
  end
  if holder then return {0, free_in, holder} end
  if first > 0 and not again then
    local most, apart = 0, {}
    for i = 1, locks do
      local promised = promised_for(KEYS[i])
      local accepted = accepted_for(KEYS[i], promised)
      before[i], apart[i] = before[i] or accepted, accepted ~= promised
      most = math.max(most, tonumber(promised))
    end
    if first <= most then return {2, whole(most)} end
    local time = redis.call('TIME')
    local now = time[1] * 1000000 + time[2]
    if last > now + AHEAD then return {3, whole(now)} end
    for i = 1, locks do
      put(ARGV[6], KEYS[i])
      if apart[i] then redis.call('ZREM', book, ACCEPTED .. KEYS[i]) end
    end
  end
  for i = 1, locks do redis.call('SET', KEYS[i], value(before[i]), 'PX', ttl) end
  return {1}
end

if ARGV[1] == 'extend' or ARGV[1] == 'keep' then
  -- Extend takes what is missing, keep does not.
  -- Reply 1 if the locks are the token's for the whole ttl, 2 if so and one of them was missing, 0 if not.
  local missing = {}
  for i = 1, locks do
    local held = redis.pcall('GET', KEYS[i])
    if type(held) == 'table' then
      if not string.find(held.err, 'WRONGTYPE') then return held end
      return 0
    end
    if held and not begins(held, token) then return 0 end
    if not held then
      if ARGV[1] == 'keep' then return 0 end
      local promised = mine and promised_for(KEYS[i]) or '0'
      local accepted = mine and accepted_for(KEYS[i], promised) or '0'
      -- Somebody may have been granted the lock here meanwhile, and be gone again; or we have let it go. If it is
      -- our own number, the node has merely forgotten the lock.
      if tonumber(accepted) > last then return 0 end
      missing[i] = {promised = math.max(tonumber(promised), last), before = accepted}
    end
  end
  for i = 1, locks do
    local lost = missing[i]
    if lost then
      if mine then note(KEYS[i], lost.promised, last) end
      redis.call('SET', KEYS[i], value(lost.before), 'PX', ttl)
    else
      redis.call('PEXPIRE', KEYS[i], ttl)
    end
    -- Whoever writes a key is told of its changes no more; who reads it is.
    redis.call('GET', KEYS[i])
  end
  return next(missing) and 2 or 1
end

-- release: of what may have been granted. ARGV[3] is how long the locks stay taken still, or 0
-- withdraw: of what nobody was granted, and nobody will be
-- Reply 1 if all locks were the token's, 0 if not. A proposal of the same block that comes later is refused, as
-- more than the block is promised. After a release, an extension takes nothing, as if more had been accepted;
-- after a withdrawal it is as if we had never been here.
local outcome, was_granted = 1, ARGV[1] == 'release'

local function note_end(lock, held)
  local promised = promised_for(lock)
  -- The usual case: our vote is the last that was.
  if was_granted and promised == ARGV[6] and held and begins(held, mine) then
    return put(whole(last + 1), lock)
  end
  local is_ours, before = held and begins(held, token), held and before_of(held)
  local accepted = tonumber(accepted_for(lock, promised))
  if was_granted then
    accepted = math.max(accepted, last + 1)
    -- Nor may it be forgotten when the vote that stands here comes to nothing.
    if before and not is_ours and tonumber(before) <= last then
      local vote = string.sub(held, 1, #held - #before)
      redis.call('SET', lock, vote .. whole(last + 1), 'KEEPTTL')
    end
  elseif is_ours and before then
    accepted = tonumber(before)
  end
  note(lock, math.max(tonumber(promised), last + 1), accepted)
end

for i = 1, locks do
  local held = redis.pcall('GET', KEYS[i])
  if type(held) == 'table' and not string.find(held.err, 'WRONGTYPE') then return held end
  if type(held) ~= 'string' then held = nil end
  if not held or not begins(held, token) then
    outcome = 0
  elseif ttl > 0 then
    redis.call('PEXPIRE', KEYS[i], ttl)
  else
    redis.call('DEL', KEYS[i])
  end
  -- The lock is freed also where no memory is left for the numbers.
  if mine then pcall(note_end, KEYS[i], held) end
end
return outcome
