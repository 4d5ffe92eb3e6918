-- A lock and its wait queue: all transitions are here, and wait_queue.rs has their contract.
-- ARGV[1] operation: release, claim or probe

-- A token starts with its owner, 32 digits. The token of a process with a channel goes on with `@` and the channel id.
-- The value of a lock goes on with the contended mark `+`: the queue is not empty, so a release has to serve it. Or with a
-- space: it is empty. Behind either follows a text about the owner. Without a text there is no space.
local TOKEN = 49
local function owner_of(token) return string.sub(token, 1, 32) end
local function is_contended(value) return string.sub(value, TOKEN + 1, TOKEN + 1) == '+' end
local function has_channel(value)
  if not string.find(string.sub(value, 1, TOKEN), '^%x+@%x+$') or string.sub(value, 33, 33) ~= '@' then return false end
  local mark, text = string.sub(value, TOKEN + 1, TOKEN + 1), string.sub(value, TOKEN + 2)
  -- Values of other libraries may begin alike.
  if text == '' then return #value == TOKEN or mark == '+' end
  return (mark == ' ' or mark == '+') and string.find(text, '^[%w._-]+/%d+') ~= nil
end
local function compose(token, contended, text)
  if contended then return token .. '+' .. text end
  return text == '' and token or token .. ' ' .. text
end
local function marked(value) return compose(string.sub(value, 1, TOKEN), true, string.sub(value, TOKEN + 2)) end
-- Sends a message to the process of `token`; returns the number of receivers.
local function notify(token, kind, key)
  local message = kind .. owner_of(token) .. key
  -- A user that has lost the right to publish reaches no receiver, and still releases its locks.
  local function send(command, id)
    local receivers = redis.pcall(command, 'lock_runtime:' .. id, message)
    return type(receivers) == 'number' and receivers or 0
  end
  -- The last four digits name a channel of this shard, if not zero. The key may have moved here from another shard, and
  -- a pool may have lost that channel. The channel without these digits reaches the pool over all servers of a cluster.
  local receivers = string.sub(token, 46, 49) ~= '0000' and send('SPUBLISH', string.sub(token, 34, 49)) or 0
  return receivers > 0 and receivers or send('PUBLISH', string.sub(token, 34, 45))
end

-- Tells the head of `queue` that the lock is free in `ms`.
local function notify_head(queue, ms, lock)
  local head = redis.call('ZRANGE', queue, 0, 0)[1]
  if head then notify(head, 'called:' .. ms .. ':', lock) end
end

-- Reserves the lock of `owner`, which releases it, for the first queued process that is alive, for as long as such a process
-- needs to claim it. Returns whether there was one.
local function hand_off(owner, lock, queue, reservation, more)
  -- Counted before the queue is changed: a server that moves the slot away refuses a look at a queue that has become empty.
  local left = redis.call('ZCARD', queue)
  for _ = 1, math.min(left, 64) do
    local head = redis.call('ZPOPMIN', queue)[1]
    left = left - 1
    -- The channel of a dead process has no receiver. An owner has a second entry if its channel has moved while it waited.
    if owner_of(head) ~= owner and notify(head, 'called:0:', lock) > 0 then
      redis.call('SET', lock, compose(string.sub(head, 1, TOKEN), left + more > 0, ''), 'PX', reservation)
      if left > 0 then notify_head(queue, reservation, lock) end
      return true
    end
  end
  return false
end

local function enqueue(queue, token)
  local time = redis.call('TIME')
  redis.call('ZADD', queue, 'NX', time[1] * 1000000 + time[2], token)
  redis.call('PEXPIRE', queue, 10000)
end

if ARGV[1] == 'release' then
  -- KEYS the locks, then the wait queue of each
  -- ARGV[2] token, [3] ms until the locks are free, [4] ms of a reservation for the head of a queue, [5] token of the
  -- successor or '', [6] its ttl in ms, [7] barging window in ms, in which the locks are free for requests outside the queue
  -- Reply 1 if the token held all locks, 0 if at least one was not held; if all were held and there is a successor,
  -- 2 if it holds the lock now, 3 if it is queued
  local token, free_after, reservation, successor = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
  local outcome = 1
  for i = 1, #KEYS / 2 do
    local lock, queue = KEYS[i], KEYS[#KEYS / 2 + i]
    local holder = redis.pcall('GET', lock)
    -- A key of another type is not held by this token. Any other error leaves the holder unknown.
    if type(holder) == 'table' and not string.find(holder.err, 'WRONGTYPE') then return holder end
    if type(holder) ~= 'string' or owner_of(holder) ~= owner_of(token) then
      outcome = 0
      if has_channel(token) then redis.call('ZREM', queue, token) end
    elseif free_after ~= '0' then
      redis.call('PEXPIRE', lock, free_after)
      -- The end of a ttl is no message.
      if is_contended(holder) then notify_head(queue, free_after, lock) end
    elseif ARGV[7] ~= '0' then
      redis.call('DEL', lock)
      notify_head(queue, ARGV[7], lock)
    elseif is_contended(holder) and hand_off(owner_of(token), lock, queue, reservation, successor ~= '' and 1 or 0) then
      if successor ~= '' then
        enqueue(queue, successor)
        outcome = 3
      end
    elseif successor ~= '' then
      -- A server without memory for the successor still frees the lock.
      if redis.pcall('SET', lock, successor, 'PX', ARGV[6]).err then
        redis.call('DEL', lock)
      else
        outcome = 2
      end
    else
      redis.call('DEL', lock)
    end
  end
  return outcome
end

if ARGV[1] == 'claim' then
  -- KEYS[1] lock, [2] its wait queue, [3] the fence counter if a fence is required
  -- ARGV[2] token, [3] ttl in ms, [4] number of fences or 0, [5] a text about the owner or ''
  -- Reply {1, first fence or 0, number of fences, number of queued tokens} if granted; {0, ms until the holder's lease expires
  -- or -1 if unknown, rank in the queue, 1 if the holder's process has a channel} if held by another owner
  local lock, queue, token = KEYS[1], KEYS[2], ARGV[2]
  local holder = redis.call('GET', lock)
  local is_own = holder and owner_of(holder) == owner_of(token)
  if holder and not is_own then
    enqueue(queue, token)
    local rank, notifiable = redis.call('ZRANK', queue, token), has_channel(holder)
    local is_first = notifiable and not is_contended(holder)
    if is_first then redis.call('SET', lock, marked(holder), 'KEEPTTL') end
    -- Repeated at every recheck of the first in the queue, as a message may be lost.
    if is_first or notifiable and rank == 0 then notify(holder, 'wanted:0:', lock) end
    return {0, redis.call('PTTL', lock), rank, notifiable and 1 or 0}
  end
  -- A claim proves that its process is alive; earlier tokens keep their positions.
  local fence, fences = 0, 0
  if KEYS[3] then fence, fences = mint(KEYS[3], 1, tonumber(ARGV[4])) end
  local waiting = redis.call('ZCARD', queue)
  if is_own then
    -- Never shorten the lease: this may be a late request with a shorter ttl.
    local left = math.max(redis.call('PTTL', lock), tonumber(ARGV[3]))
    if has_channel(holder) then
      -- A reservation has no text.
      local text = string.sub(holder, TOKEN + 2)
      if text == '' then text = ARGV[5] end
      holder = compose(string.sub(holder, 1, TOKEN), is_contended(holder) or waiting > 0, text)
    end
    redis.call('SET', lock, holder, 'PX', left)
  else
    local was_queued = redis.call('ZSCORE', queue, token)
    if was_queued then waiting = waiting - 1 end
    -- The first write, so that a server that refuses writes refuses all of them.
    redis.call('SET', lock, compose(token, waiting > 0, ARGV[5]), 'PX', ARGV[3])
    if was_queued then redis.call('ZREM', queue, token) end
  end
  return {1, fence, fences, waiting}
end

-- probe: KEYS[1] a lock that no process takes, [2] its wait queue; ARGV[2] token
-- Reply at least 1 if this user may run all of the above and the process receives messages on its channel
enqueue(KEYS[2], ARGV[2])
redis.call('ZRANK', KEYS[2], ARGV[2])
redis.call('ZRANGE', KEYS[2], 0, 0)
redis.call('ZPOPMIN', KEYS[2])
redis.call('ZREM', KEYS[2], ARGV[2])
redis.call('ZCARD', KEYS[2])
redis.call('ZSCORE', KEYS[2], ARGV[2])
return notify(ARGV[2], 'probe:0:', KEYS[1])
