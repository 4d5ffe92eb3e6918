-- One node's part in a quorum: it votes for an owner by taking the locks, and keeps a book of numbers for each.
-- quorum/mod.rs says what for.
-- KEYS the locks; and if there is a number, the node's book
-- ARGV[1] what to do: propose, extend, keep, release or withdraw; [2] token; [3] ms to keep the locks; [4] number
-- of locks; [5] first and [6] last number of the block, or 0; [7] how many entries the book may have; [8] how many,
-- if some are of locks that are not held, or [7]

-- What is where, for a block of numbers first..last (without one there is no book, and a lock holds the token alone):
--
--   after                    the lock                promised              accepted
--   a vote                   token#first#before      last                  last; `before` is what it was
--   its withdrawal           gone                    above last            before
--   a withdrawal elsewhere   as it was               above last            as it was
--   a release                gone, or ~its value     above last            above last
--   a renewal that finds     token#first#before      as it was, or last    last
--     nothing in the lock
--
-- Promised: no number up to it will be accepted. Accepted: the greatest number that was, and may have been granted; it
-- keeps renewals of older grants away. It has an entry of its own only where it is less than what is promised, which
-- is where proposals came to nothing.

-- A full book forgets the entries with the least numbers. For what it has forgotten its floor stands in, above
-- which no forgotten entry was: so what counts for a lock never goes down, whatever clocks do.
local MOST = tonumber(ARGV[7])
-- A book with more entries than this forgets first those of locks that are not held. For them the floor stands in as
-- well as an entry; for a lock that is held its entry says whether a renewal may take the lock again.
local SPARE = tonumber(ARGV[8] or ARGV[7])
-- So many entries are looked at for one that is added.
local LOOK = 32
-- The floor's place in the book: no lock has an empty key.
local FLOOR = ''
-- Before the key, the place of what was accepted, if it has one of its own: no key has this byte.
local ACCEPTED = '\255'
-- Microseconds that a number may be ahead of this node's clock: else one client could shut all others out.
local AHEAD = 60000000
-- Before the value of a lock that was released and is to stay taken for a while: nobody's token begins so.
local KEPT = '~'

local token, ttl, locks = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local first, last = tonumber(ARGV[5]), tonumber(ARGV[6])
local book = KEYS[locks + 1]
local whole = function(number) return string.format('%.0f', number) end

-- As text.
local function promised_for(lock)
  return redis.call('ZSCORE', book, lock) or redis.call('ZSCORE', book, FLOOR) or '0'
end
local function accepted_for(lock, otherwise)
  return redis.call('ZSCORE', book, ACCEPTED .. lock) or otherwise
end

local function is_held(entry)
  local lock = string.gsub(entry, '^' .. ACCEPTED, '')
  for i = 1, locks do
    if KEYS[i] == lock then return true end
  end
  -- A key of which nothing may be known here counts as free. So does one whose slot is on its way to another server.
  local left = redis.pcall('PTTL', lock)
  return type(left) == 'number' and left ~= -2
end

local function forget_unheld(over)
  local least, floor = redis.call('ZRANGE', book, 0, LOOK - 1, 'WITHSCORES'), nil
  for at = 1, #least, 2 do
    if over <= 0 then break end
    local entry = least[at]
    if entry ~= FLOOR and not is_held(entry) then
      redis.call('ZREM', book, entry)
      floor, over = least[at + 1], over - 1
    end
  end
  if floor then redis.call('ZADD', book, 'GT', floor, FLOOR) end
end

local function put(...)
  if redis.call('ZADD', book, ...) == 0 then return end
  if SPARE < MOST then
    local over = redis.call('ZCARD', book) - SPARE
    if over > 0 then forget_unheld(over) end
  end
  while redis.call('ZCARD', book) > MOST do
    -- The floor, if there is one yet, and the entry with the least number; or two entries that have come to be
    -- below the floor, which stays.
    local least = redis.call('ZPOPMIN', book, 2)
    redis.call('ZADD', book, 'GT', least[4], FLOOR)
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

local function clock()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

-- With a number, what its vote's value begins with.
local mine = first > 0 and token .. '#' .. ARGV[5] .. '#'
local function value(before) return mine and mine .. before or token end
-- Of a vote with a number, whoever's it is.
local function before_of(held) return string.match(held, '^%x+/%x+#%d+#(%d+)$') end
-- A token is an owner and its attempt, or the owner alone for whichever of its attempts. Neither begins another one.
local function begins(text, with) return string.sub(text, 1, #with) == with end

if ARGV[1] == 'propose' then
  -- Reply {1} if the locks are the token's for the whole ttl; {0, ms until the holder's time is over or -1 if
  -- unknown, the holder} if one is somebody else's; {2, number promised} if that is not below ours; {3, the
  -- node's clock} if ours is too far ahead of it. Then nothing was changed.
  local again, free_in, holder, before = mine, 0, nil, {}
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
  if mine and not again then
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
-- Reply 1 if all locks were the token's, 0 if not. A proposal of the same block that comes later is refused; and
-- after a release an extension, too.
local outcome, was_granted = 1, ARGV[1] == 'release'

local function note_end(lock, held)
  local promised = promised_for(lock)
  -- The usual case: our vote stands, and nothing was promised since. Then nothing else was accepted.
  if was_granted and promised == ARGV[6] and held and begins(held, mine) then
    return put(whole(last + 1), lock)
  end
  local is_ours, before = held and begins(held, token), held and before_of(held)
  local above, accepted = last + 1, tonumber(accepted_for(lock, promised))
  if was_granted then
    accepted = math.max(accepted, above)
    -- Nor may it be forgotten when the vote that stands here comes to nothing.
    if before and not is_ours and tonumber(before) <= last then
      redis.call('SET', lock, string.sub(held, 1, #held - #before) .. whole(above), 'KEEPTTL')
    end
  else
    -- What is further ahead was refused, and will be until the clock has passed it.
    above = math.min(above, clock() + AHEAD)
    if is_ours and before then accepted = tonumber(before) end
  end
  note(lock, math.max(tonumber(promised), above), accepted)
end

for i = 1, locks do
  local held = redis.pcall('GET', KEYS[i])
  if type(held) == 'table' and not string.find(held.err, 'WRONGTYPE') then return held end
  if type(held) ~= 'string' then held = nil end
  if held and begins(held, token) then
    if ttl == 0 then
      redis.call('DEL', KEYS[i])
    -- No late copy of anything finds its token there. Without memory for it, the lock is freed in time all the same.
    elseif type(redis.pcall('SET', KEYS[i], KEPT .. held, 'PX', ttl).err) == 'string' then
      redis.call('PEXPIRE', KEYS[i], ttl)
    end
  -- Said twice it is done once.
  elseif not held or not begins(held, KEPT .. token) then
    outcome = 0
  end
  -- The lock is freed also where no memory is left for the numbers.
  if mine then pcall(note_end, KEYS[i], held) end
end
return outcome
