-- Frees those locks that are the owner's, or lets them expire after a while.
-- KEYS the locks; ARGV owner, ms to keep them still (0 frees at once)
-- Reply 1 if all were the owner's, 0 if at least one was not
local all = 1
for i = 1, #KEYS do
  local holder = redis.pcall('GET', KEYS[i])
  -- a key of another type is somebody else's; any other error says nothing about whose it is
  if type(holder) == 'table' and not string.find(holder.err, 'WRONGTYPE') then return holder end
  if holder ~= ARGV[1] then
    all = 0
  elseif ARGV[2] == '0' then
    redis.call('DEL', KEYS[i])
  else
    redis.call('PEXPIRE', KEYS[i], ARGV[2])
  end
end
return all
