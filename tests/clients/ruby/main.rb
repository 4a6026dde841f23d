# See ../README.md. With Debian's ruby-grpc.
require 'grpc'

ADDRESS, FOLDER = ARGV
SERVICE = '/penstock.v1.TextService/'.freeze
RAW = proc { |bytes| bytes }

def request(name)
  File.binread(File.join(FOLDER, name))
end

def save(name, *messages)
  File.binwrite(File.join(FOLDER, "#{name}.out"), messages.map { |message| [message.bytesize].pack('N') + message }.join)
end

def status
  yield
  0
rescue GRPC::BadStatus => e
  @failure = e
  e.code
end

STUB = GRPC::ClientStub.new(ADDRESS, :this_channel_is_insecure)

def chat(name, **options)
  STUB.server_streamer("#{SERVICE}Chat", request(name), RAW, RAW, return_op: true, **options)
end

def score
  STUB.request_response("#{SERVICE}Score", request('score'), RAW, RAW)
end

messages = []
puts "chat #{status { chat('chat').execute.each { |message| messages << message } }}"
save('chat', *messages)

count = 0
call = chat('long')
code = status do
  call.execute.each do
    count += 1
    call.cancel if count == 3
  end
end
puts "cancel #{code}"

puts "deadline #{status { chat('long', deadline: Time.now + 0.2).execute.each {} }}"

puts "error #{status { chat('bad').execute.each {} }}"
details = @failure.metadata['grpc-status-details-bin']
save('error', details) if details

answer = ''
puts "score #{status { answer = score }}"
save('score', answer)

codes = Array.new(50) { Thread.new { status { score } } }.map(&:value)
puts "many #{codes.max}"
