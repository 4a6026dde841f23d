// See ../README.md. With Debian's libgrpc-java.
import io.grpc.CallOptions;
import io.grpc.ClientCall;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import io.grpc.netty.NettyChannelBuilder;
import java.io.ByteArrayInputStream;
import java.io.DataOutputStream;
import java.io.IOException;
import java.io.InputStream;
import java.io.UncheckedIOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import java.util.function.BiConsumer;

public final class Main {
    private static final Metadata.Key<byte[]> DETAILS =
            Metadata.Key.of("grpc-status-details-bin", Metadata.BINARY_BYTE_MARSHALLER);
    private static ManagedChannel channel;
    private static Path folder;

    private static final class Raw implements MethodDescriptor.Marshaller<byte[]> {
        @Override
        public InputStream stream(byte[] value) {
            return new ByteArrayInputStream(value);
        }

        @Override
        public byte[] parse(InputStream stream) {
            try {
                return stream.readAllBytes();
            } catch (IOException error) {
                throw new UncheckedIOException(error);
            }
        }
    }

    private record Ended(Status status, Metadata trailers, List<byte[]> messages) {}

    private static void save(String name, List<byte[]> messages) throws IOException {
        try (var out = new DataOutputStream(Files.newOutputStream(folder.resolve(name + ".out")))) {
            for (byte[] message : messages) {
                out.writeInt(message.length);
                out.write(message);
            }
        }
    }

    private static CompletableFuture<Ended> call(
            String method, String request, CallOptions options, BiConsumer<ClientCall<byte[], byte[]>, Integer> message)
            throws IOException {
        boolean streams = method.equals("Chat");
        var descriptor = MethodDescriptor.<byte[], byte[]>newBuilder()
                .setType(streams ? MethodDescriptor.MethodType.SERVER_STREAMING : MethodDescriptor.MethodType.UNARY)
                .setFullMethodName("penstock.v1.TextService/" + method)
                .setRequestMarshaller(new Raw())
                .setResponseMarshaller(new Raw())
                .build();
        ClientCall<byte[], byte[]> call = channel.newCall(descriptor, options);
        var ended = new CompletableFuture<Ended>();
        var messages = new ArrayList<byte[]>();
        call.start(
                new ClientCall.Listener<>() {
                    @Override
                    public void onMessage(byte[] received) {
                        messages.add(received);
                        message.accept(call, messages.size());
                        call.request(1);
                    }

                    @Override
                    public void onClose(Status status, Metadata trailers) {
                        ended.complete(new Ended(status, trailers, messages));
                    }
                },
                new Metadata());
        call.request(2);
        call.sendMessage(Files.readAllBytes(folder.resolve(request)));
        call.halfClose();
        return ended;
    }

    private static int code(Ended ended) {
        return ended.status().getCode().value();
    }

    public static void main(String[] arguments) throws Exception {
        folder = Path.of(arguments[1]);
        channel = NettyChannelBuilder.forTarget(arguments[0]).usePlaintext().build();
        BiConsumer<ClientCall<byte[], byte[]>, Integer> nothing = (call, count) -> {};

        Ended ended = call("Chat", "chat", CallOptions.DEFAULT, nothing).get();
        save("chat", ended.messages());
        System.out.println("chat " + code(ended));

        ended = call("Chat", "long", CallOptions.DEFAULT, (call, count) -> {
            if (count == 3) call.cancel("enough", null);
        }).get();
        System.out.println("cancel " + code(ended));

        var deadline = CallOptions.DEFAULT.withDeadlineAfter(200, TimeUnit.MILLISECONDS);
        System.out.println("deadline " + code(call("Chat", "long", deadline, nothing).get()));

        ended = call("Chat", "bad", CallOptions.DEFAULT, nothing).get();
        if (ended.trailers().containsKey(DETAILS)) save("error", List.of(ended.trailers().get(DETAILS)));
        System.out.println("error " + code(ended));

        ended = call("Score", "score", CallOptions.DEFAULT, nothing).get();
        save("score", ended.messages());
        System.out.println("score " + code(ended));

        var calls = new ArrayList<CompletableFuture<Ended>>();
        for (int i = 0; i < 50; ++i) calls.add(call("Score", "score", CallOptions.DEFAULT, nothing));
        int worst = 0;
        for (var one : calls) worst = Math.max(worst, code(one.get()));
        System.out.println("many " + worst);
        channel.shutdownNow();
    }
}
