-- Takes locks for one owner or several: for each all of its locks, or none. Locks that the owner already holds count as taken:
-- the request is a retry.
-- KEYS the locks of all requests, then the fence counter if fences are required; ARGV ttl in ms, number of locks of each
-- request, number of fences of each or 0, then the value of the locks of each request
-- Reply the number of fences of each grant; then for each request: its first fence, or 0 without a counter, if granted;
-- -1 - ms until the last lease expires, or -1 if unknown, if held by another owner; the text of an error
local ttl, locks, length = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local requests = #ARGV - 3

-- The usual case, in four fifths of the time: one request for one lock that is free, with a fence.
if requests == 1 and locks == 1 and length > 0 and not redis.pcall('GET', KEYS[1]) then
  local granted, fences = mint(KEYS[2], 1, length)
  redis.call('SET', KEYS[1], ARGV[4], 'PX', ARGV[1])
  return {fences, granted}
end

local fence
local function next_fence(request)
  if length == 0 then return 0 end
  if fence then fence = fence + length else fence, length = mint(KEYS[#KEYS], requests - request + 1, length) end
  return fence
end

-- -1 if unknown.
local function expiry_of(key)
  local left = redis.pcall('PTTL', key)
  return type(left) == 'number' and left or -1
end

-- `minted` is a fence that the request has already, `seen` the value of its only lock, which has not changed since.
local function acquire(request, minted, seen)
  local first, last, value = (request - 1) * locks + 1, request * locks, ARGV[request + 3]
  local own, expires_in = {}, 0
  for i = first, last do
    local holder = seen or redis.pcall('GET', KEYS[i])
    if type(holder) == 'table' then return holder.err end
    -- Compare the owner alone: a claim of another owner may have added the contended mark.
    if holder and string.sub(holder, 1, 32) == string.sub(value, 1, 32) then
      own[i] = holder
    elseif holder then
      local left = expiry_of(KEYS[i])
      if left < 0 or expires_in < 0 then expires_in = -1 else expires_in = math.max(expires_in, left, 1) end
    end
  end
  if expires_in ~= 0 then return expires_in < 0 and -1 or -1 - expires_in end

  local granted = minted or next_fence(request)
  for i = first, last do
    -- Never shorten the lease: this may be a late request with a shorter ttl.
    local left = own[i] and expiry_of(KEYS[i]) or 0
    redis.call('SET', KEYS[i], own[i] or value, 'PX', math.max(left, ttl))
  end
  return granted
end

local holders = locks == 1 and redis.call('MGET', unpack(KEYS, 1, requests)) or {}
local replies = {}
for request = 1, requests do
  local minted, is_set
  -- The usual case. A key of another type looks free, and is not overwritten.
  if locks == 1 and not holders[request] then
    minted = next_fence(request)
    is_set = redis.call('SET', KEYS[request], ARGV[request + 3], 'NX', 'PX', ttl)
  end
  replies[request + 1] = is_set and minted or acquire(request, minted, holders[request])
end
replies[1] = length
return replies
