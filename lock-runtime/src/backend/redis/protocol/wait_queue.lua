-- The line of a lock: who holds it, and who of our processes is next. All of its transitions are here;
-- line.rs says what they are for.
-- ARGV[1] what to do: release, claim or probe

-- A token begins with its owner, 32 digits. One of ours names its process's channel behind an `@`; a `+`
-- behind that is the mark: others stand in line, so a release has to look.
local function owner_of(token) return string.sub(token, 1, 32) end
local function is_ours(token)
  local length = #token
  return (length == 49 or length == 50 and string.sub(token, 50) == '+')
    and string.find(token, '^%x+@%x+%+?$') and string.sub(token, 33, 33) == '@'
end
local function is_marked(token) return #token == 50 end
local function tell(token, what, key)
  local message = what .. owner_of(token) .. key
  -- a user who may not, any more, reaches nobody, and still frees its locks
  local function send(command, id)
    local heard = redis.pcall(command, 'lock_runtime:' .. id, message)
    return type(heard) == 'number' and heard or 0
  end
  -- The last four digits name a channel of this shard, if not zero. The key may have come from another shard since, and a
  -- pool that has lost that channel still hears the one without them, which goes to all servers of a cluster.
  local heard = string.sub(token, 46, 49) ~= '0000' and send('SPUBLISH', string.sub(token, 34, 49)) or 0
  return heard > 0 and heard or send('PUBLISH', string.sub(token, 34, 45))
end

-- Gives a lock of ours to the first in line who is alive, for as long as a living one needs to claim it.
-- True if somebody got it.
local function pass(lock, line, grant, more)
  for _ = 1, 64 do
    local head = redis.call('ZPOPMIN', line)[1]
    if not head then return false end
    local behind = redis.call('ZCARD', line) + more
    -- Nobody listens to the channel of a process that is gone.
    if tell(head, 'called:0:', lock) > 0 then
      redis.call('SET', lock, behind > 0 and head .. '+' or head, 'PX', grant)
      local next = redis.call('ZRANGE', line, 0, 0)[1]
      if next then tell(next, 'called:' .. grant .. ':', lock) end
      return true
    end
  end
  return false
end

local function join(line, token)
  local time = redis.call('TIME')
  redis.call('ZADD', line, 'NX', time[1] * 1000000 + time[2], token)
  redis.call('PEXPIRE', line, 10000)
end

if ARGV[1] == 'release' then
  -- KEYS the locks, then the line of each
  -- ARGV[2] token, [3] ms to keep the locks still, [4] ms of a grant to the next in line, [5] token of the
  -- successor or '', [6] its ttl in ms, [7] ms to leave the locks free for those who stand in no line
  -- Reply 1 if all locks were the token's, 0 if at least one was not; if they were and there is a successor,
  -- 2 if it has the lock now, 3 if it stands in line
  local token, keep, grant, heir = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
  local outcome = 1
  for i = 1, #KEYS / 2 do
    local lock, line = KEYS[i], KEYS[#KEYS / 2 + i]
    local holder = redis.pcall('GET', lock)
    -- a key of another type is somebody else's; any other error says nothing about whose it is
    if type(holder) == 'table' and not string.find(holder.err, 'WRONGTYPE') then return holder end
    if type(holder) ~= 'string' or owner_of(holder) ~= owner_of(token) then
      outcome = 0
      if is_ours(token) then redis.call('ZREM', line, token) end
    elseif keep ~= '0' then
      redis.call('PEXPIRE', lock, keep)
    elseif ARGV[7] ~= '0' then
      redis.call('DEL', lock)
      local next = redis.call('ZRANGE', line, 0, 0)[1]
      if next then tell(next, 'called:' .. ARGV[7] .. ':', lock) end
    elseif is_marked(holder) and pass(lock, line, grant, heir ~= '' and 1 or 0) then
      if heir ~= '' then
        join(line, heir)
        outcome = 3
      end
    elseif heir ~= '' then
      -- A server that has no memory for it still frees the lock.
      if redis.pcall('SET', lock, heir, 'PX', ARGV[6]).err then
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
  -- KEYS[1] lock, [2] its line, [3] the fence counter if a fence is wanted
  -- ARGV[2] token, [3] ttl in ms, [4] how many fences
  -- Reply {1, first fence or '', how many stand in line} if granted, {0, ms until the holder's time is over
  -- or -1 if unknown, rank in line, 1 if the holder is one of ours} if busy
  local lock, line, token = KEYS[1], KEYS[2], ARGV[2]
  local holder = redis.call('GET', lock)
  local mine = holder and owner_of(holder) == owner_of(token)
  if holder and not mine then
    join(line, token)
    local rank, ours = redis.call('ZRANK', line, token), is_ours(holder)
    local news = ours and not is_marked(holder)
    if news then redis.call('SET', lock, holder .. '+', 'KEEPTTL') end
    -- Again with every look of the first in line: a message may get lost.
    if news or ours and rank == 0 then tell(holder, 'wanted:0:', lock) end
    return {0, redis.call('PTTL', lock), rank, ours and 1 or 0}
  end
  -- Whoever asks is alive; those who came before keep their places.
  local fence = mint(KEYS[3], ARGV[4])
  local waiting = redis.call('ZCARD', line)
  if mine then
    -- Never shorter: this may be a late request of one that wanted it for less time.
    local left = math.max(redis.call('PTTL', lock), tonumber(ARGV[3]))
    if waiting > 0 and is_ours(holder) and not is_marked(holder) then holder = holder .. '+' end
    redis.call('SET', lock, holder, 'PX', left)
  else
    local stood = redis.call('ZSCORE', line, token)
    if stood then waiting = waiting - 1 end
    -- The first write, so that a server that refuses writes refuses all.
    redis.call('SET', lock, waiting > 0 and token .. '+' or token, 'PX', ARGV[3])
    if stood then redis.call('ZREM', line, token) end
  end
  return {1, fence, waiting}
end

-- probe: KEYS[1] a lock that nobody takes, [2] its line; ARGV[2] token
-- Reply 1 if this user may do all of the above and hears its own channel
join(KEYS[2], ARGV[2])
redis.call('ZRANK', KEYS[2], ARGV[2])
redis.call('ZRANGE', KEYS[2], 0, 0)
redis.call('ZPOPMIN', KEYS[2])
redis.call('ZREM', KEYS[2], ARGV[2])
redis.call('ZCARD', KEYS[2])
redis.call('ZSCORE', KEYS[2], ARGV[2])
return tell(ARGV[2], 'probe:0:', KEYS[1])
