-- One node's part in a quorum: it votes for an owner by taking the locks, and keeps the greatest number that
-- it has accepted for each. quorum/mod.rs says what for.
-- KEYS the locks; and if there is a number, the node's book
-- ARGV[1] what to do: propose, extend, keep or withdraw; [2] token; [3] ms to keep the locks; [4] number of locks;
-- [5] first and [6] last number of the block, or 0

-- The book has so many locks at the most. It forgets those with the least numbers, and its floor stands in for
-- them: so what counts as accepted for a lock never goes down, whatever clocks do.
local MOST = 100000
-- The floor's place in the book: no lock has an empty key.
local FLOOR = ''
-- Microseconds that a number may be ahead of this node's clock: else one client could shut all others out.
local AHEAD = 60000000

local token, ttl, locks = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local first, last = tonumber(ARGV[5]), tonumber(ARGV[6])
local book = KEYS[locks + 1]
local whole = function(number) return string.format('%.0f', number) end

-- The greatest number that this node has accepted for a lock.
local function accepted(lock)
  return tonumber(redis.call('ZSCORE', book, lock) or redis.call('ZSCORE', book, FLOOR) or '0')
end

local function accept(lock, number)
  redis.call('ZADD', book, whole(number), lock)
  if redis.call('ZCARD', book) > MOST then
    -- The floor, if there is one yet, and the lock with the least number.
    local least = redis.call('ZPOPMIN', book, 2)
    redis.call('ZADD', book, least[4], FLOOR)
  end
end

-- A token is its owner and the attempt; the owner alone stands for whichever of its attempts.
local function is_of(holder) return string.sub(holder, 1, #token) == token end
local value = first > 0 and token .. '#' .. whole(first) or token

if ARGV[1] == 'propose' then
  -- Reply {1} if the locks are the token's for the whole ttl; {0, ms until the holder's time is over or -1 if
  -- unknown, the holder} if one is somebody else's; {2, number accepted} if that is not below ours; {3, the
  -- node's clock} if ours is too far ahead of it. Then nothing was changed.
  local again, free_in, holder = first > 0, 0, nil
  for i = 1, locks do
    local held = redis.call('GET', KEYS[i])
    if held and not is_of(held) then
      local left = redis.call('PTTL', KEYS[i])
      if left < 0 or free_in < 0 then free_in = -1 else free_in = math.max(free_in, left, 1) end
      holder = held
    end
    -- Our own grant of this very number, asked for again: the number in the key says so, not the book.
    if held ~= value then again = false end
  end
  if holder then return {0, free_in, holder} end
  if first > 0 and not again then
    local most = 0
    for i = 1, locks do most = math.max(most, accepted(KEYS[i])) end
    if first <= most then return {2, whole(most)} end
    local time = redis.call('TIME')
    local now = time[1] * 1000000 + time[2]
    if last > now + AHEAD then return {3, whole(now)} end
    for i = 1, locks do accept(KEYS[i], last) end
  end
  for i = 1, locks do redis.call('SET', KEYS[i], value, 'PX', ttl) end
  return {1}
end

if ARGV[1] == 'extend' or ARGV[1] == 'keep' then
  -- Extend takes what is missing, keep does not.
  -- Reply 1 if the locks are the token's for the whole ttl, 2 if so and one of them was missing, 0 if not.
  local missing = false
  for i = 1, locks do
    local held = redis.pcall('GET', KEYS[i])
    if type(held) == 'table' then
      if not string.find(held.err, 'WRONGTYPE') then return held end
      return 0
    end
    if held and not is_of(held) then return 0 end
    if not held then
      if ARGV[1] == 'keep' then return 0 end
      -- Somebody may have been granted the lock here meanwhile, and be gone again; or we have let it go. If it is
      -- our own number, the node has merely forgotten the lock.
      if first > 0 and accepted(KEYS[i]) > last then return 0 end
      missing = true
    end
  end
  for i = 1, locks do
    if redis.call('PEXPIRE', KEYS[i], ttl) == 0 then
      if first > 0 then accept(KEYS[i], last) end
      redis.call('SET', KEYS[i], value, 'PX', ttl)
    end
    -- Whoever writes a key is told of its changes no more; who reads it is.
    redis.call('GET', KEYS[i])
  end
  return missing and 2 or 1
end

-- withdraw: ARGV[3] is how long the locks stay taken still, or 0
-- Reply 1 if all locks were the token's, 0 if not. A proposal of the same block that comes later is refused, and
-- an extension takes nothing: what counts as accepted is above the block.
local outcome = 1
for i = 1, locks do
  local held = redis.pcall('GET', KEYS[i])
  if type(held) == 'table' and not string.find(held.err, 'WRONGTYPE') then return held end
  if type(held) ~= 'string' or not is_of(held) then
    outcome = 0
  elseif ttl > 0 then
    redis.call('PEXPIRE', KEYS[i], ttl)
  else
    redis.call('DEL', KEYS[i])
  end
  -- The lock is freed also where no memory is left for the number.
  if first > 0 and accepted(KEYS[i]) <= last then pcall(accept, KEYS[i], last + 1) end
end
return outcome
