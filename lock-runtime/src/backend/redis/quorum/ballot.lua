-- One node's part in a quorum: it votes for an owner by taking the locks, and keeps the greatest number that
-- it has accepted for each. quorum/mod.rs says what for.
-- KEYS the locks; and if there is a number, the register of each lock, then the node's book
-- ARGV[1] what to do: propose, extend, keep or withdraw; [2] token; [3] ms to keep the locks; [4] number of locks;
-- [5] first and [6] last number of the block, or 0

-- A register that nobody has used for so long (beyond its lock's ttl) is forgotten. Then the book stands in:
-- its floor is the greatest number that the node had accepted before the present span of this length began.
local REMEMBERED = 3600000
-- Behind a register's number: it was withdrawn.
local WITHDRAWN = '.'

local token, ttl, locks = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local first, last = tonumber(ARGV[5]), tonumber(ARGV[6])
local book = KEYS[2 * locks + 1]
local register = function(i) return KEYS[locks + i] end
local whole = function(number) return string.format('%.0f', number) end

local span, greatest, floor
local function open_book()
  if span then return end
  local time = redis.call('TIME')
  local kept = redis.call('HMGET', book, 'span', 'greatest', 'floor')
  span = math.floor((time[1] * 1000 + time[2] / 1000) / REMEMBERED)
  greatest, floor = tonumber(kept[2] or '0'), tonumber(kept[3] or '0')
  local known = tonumber(kept[1] or '0')
  -- A clock that steps back opens no new span.
  if span > known then floor = greatest else span = known end
end

-- The greatest number that this node has accepted for a lock. Never less than it was.
local function accepted(i)
  local number = tonumber(redis.call('GET', register(i)) or '0')
  if number > 0 then return number end
  open_book()
  return floor
end

local function note(i, mark)
  redis.call('SET', register(i), whole(last) .. mark, 'PX', REMEMBERED + ttl)
end

local function accept(i, mark)
  open_book()
  note(i, mark or '')
  greatest = math.max(greatest, last)
  redis.call('HSET', book, 'span', whole(span), 'greatest', whole(greatest), 'floor', whole(floor))
end

-- A token is its owner and the attempt; the owner alone stands for whichever of its attempts.
local function is_of(holder) return string.sub(holder, 1, #token) == token end
local value = first > 0 and token .. '#' .. whole(first) or token

if ARGV[1] == 'propose' then
  -- Reply {1} if the locks are the token's for the whole ttl; {0, ms until the holder's time is over or -1 if
  -- unknown, the holder} if one is somebody else's; {2, number accepted} if that is not below ours. Then
  -- nothing was changed.
  local again, free_in, holder = first > 0, 0, nil
  for i = 1, locks do
    local held = redis.call('GET', KEYS[i])
    if held and not is_of(held) then
      local left = redis.call('PTTL', KEYS[i])
      if left < 0 or free_in < 0 then free_in = -1 else free_in = math.max(free_in, left, 1) end
      holder = held
    end
    -- Our own grant of this very number, asked for again: the number in the key says so, not the register.
    if held ~= value then again = false end
  end
  if holder then return {0, free_in, holder} end
  if first > 0 and not again then
    local most = 0
    for i = 1, locks do most = math.max(most, accepted(i)) end
    if first <= most then return {2, whole(most)} end
    for i = 1, locks do accept(i) end
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
      -- Somebody may have been granted the lock here meanwhile, and be gone again; or we have let it go. But if
      -- our own number is the last one, the node has merely forgotten it: its clock was stepped, or its
      -- memory was full.
      if first > 0 and last <= accepted(i) and redis.call('GET', register(i)) ~= whole(last) then
        return 0
      end
      missing = true
    end
  end
  for i = 1, locks do
    if redis.call('PEXPIRE', KEYS[i], ttl) == 0 then
      if first > 0 then accept(i) end
      redis.call('SET', KEYS[i], value, 'PX', ttl)
    elseif first > 0 then
      redis.call('PEXPIRE', register(i), REMEMBERED + ttl)
    end
    -- Whoever writes a key is told of its changes no more; who reads it is.
    redis.call('GET', KEYS[i])
  end
  return missing and 2 or 1
end

-- withdraw: ARGV[3] is how long the locks stay taken still, or 0
-- Reply 1 if all locks were the token's, 0 if not. A proposal of the same block that comes later is refused, and
-- an extension takes nothing.
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
  if first > 0 then
    if redis.call('GET', register(i)) == whole(last) then
      pcall(note, i, WITHDRAWN)
    elseif accepted(i) < last then
      pcall(accept, i, WITHDRAWN)
    end
  end
end
return outcome
