// See ../README.md. Built without modules, against Debian's golang-google-grpc-dev.
package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/golang/protobuf/proto"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
)

const service = "/penstock.v1.TextService/"

// raw keeps messages as bytes.
type raw struct{}

func (raw) Marshal(v interface{}) ([]byte, error) { return *v.(*[]byte), nil }
func (raw) Unmarshal(data []byte, v interface{}) error {
	*v.(*[]byte) = append([]byte{}, data...)
	return nil
}
func (raw) Name() string { return "proto" }

var (
	connection *grpc.ClientConn
	folder     string
)

func check(err error) {
	if err != nil {
		panic(err)
	}
}

func request(name string) *[]byte {
	data, err := os.ReadFile(filepath.Join(folder, name))
	check(err)
	return &data
}

func save(name string, messages ...[]byte) {
	file, err := os.Create(filepath.Join(folder, name+".out"))
	check(err)
	for _, message := range messages {
		check(binary.Write(file, binary.BigEndian, uint32(len(message))))
		_, err = file.Write(message)
		check(err)
	}
	check(file.Close())
}

func chat(ctx context.Context, name string, message func(count int)) ([][]byte, error) {
	description := &grpc.StreamDesc{ServerStreams: true}
	stream, err := connection.NewStream(ctx, description, service+"Chat", grpc.ForceCodec(raw{}))
	check(err)
	check(stream.SendMsg(request(name)))
	check(stream.CloseSend())
	var messages [][]byte
	for {
		var data []byte
		if err = stream.RecvMsg(&data); err != nil {
			if err == io.EOF {
				err = nil
			}
			return messages, err
		}
		messages = append(messages, data)
		message(len(messages))
	}
}

func score() ([]byte, error) {
	var answer []byte
	err := connection.Invoke(context.Background(), service+"Score", request("score"), &answer, grpc.ForceCodec(raw{}))
	return answer, err
}

func main() {
	var err error
	folder = os.Args[2]
	connection, err = grpc.Dial(os.Args[1], grpc.WithInsecure(), grpc.WithBlock())
	check(err)
	ignore := func(int) {}

	messages, err := chat(context.Background(), "chat", ignore)
	save("chat", messages...)
	fmt.Println("chat", int(status.Code(err)))

	ctx, cancel := context.WithCancel(context.Background())
	_, err = chat(ctx, "long", func(count int) {
		if count == 3 {
			cancel()
		}
	})
	cancel()
	fmt.Println("cancel", int(status.Code(err)))

	ctx, cancel = context.WithTimeout(context.Background(), 200*time.Millisecond)
	_, err = chat(ctx, "long", ignore)
	cancel()
	fmt.Println("deadline", int(status.Code(err)))

	_, err = chat(context.Background(), "bad", ignore)
	// The trailer, which grpc-go keeps here.
	details, failure := proto.Marshal(status.Convert(err).Proto())
	check(failure)
	save("error", details)
	fmt.Println("error", int(status.Code(err)))

	answer, err := score()
	save("score", answer)
	fmt.Println("score", int(status.Code(err)))

	codes := make(chan int)
	for i := 0; i < 50; i++ {
		go func() {
			_, err := score()
			codes <- int(status.Code(err))
		}()
	}
	worst := 0
	for i := 0; i < 50; i++ {
		if code := <-codes; code > worst {
			worst = code
		}
	}
	fmt.Println("many", worst)
}
